#pragma once

// Which chunks of its segment a block walks. Places are counted in the order of the walk: place p
// is the segment's chunk p, or the p-th from its end when the walk goes backwards. A piece covers
// places [main, end); it makes its entry state by walking [first, main) before, from the segment's
// boundary state where first is 0 and no gate forgot what lies there.

#include "kernels/gdn/cuda/gates.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

/// What lies before gates whose logs sum to less is 1.5e-8 of a state: with keys of unit length and
/// beta in [0, 2] a state only shrinks on its way.
constexpr float kForgottenLog = -18.0F;
/// Time of a chunk without outputs in that of a chunk with.
constexpr float kCatchUpTime = 0.75F;
/// Most chunks that a warp looks at: a head that takes longer to forget walks from the boundary.
/// One first, which is enough for most heads, then the others at once.
constexpr int32_t kChunksOfWarp = 8;

struct WalkRange {
    int32_t first, main, end;
    bool from_boundary;  // starts from the boundary state, not from zeros
    bool is_long;        // of a head whose pieces need all that lies before them
};

struct WalkOrder {
    const Chunk* chunks;
    int32_t first_chunk, count;  // of the segment
    bool backwards;
    [[nodiscard]] HCP_DEVICE int32_t chunk_at(int32_t place) const {
        return first_chunk + (backwards ? count - 1 - place : place);
    }
};

HCP_DEVICE Piece load_piece(const Piece* piece) {
    return {device::load_global(&piece->segment), device::load_global(&piece->first_chunk),
            device::load_global(&piece->chunks), device::load_global(&piece->index),
            device::load_global(&piece->pieces)};
}

/// The lane's part of the sum of a chunk's log gates.
HCP_DEVICE float lane_log_decay(const GateInputs& gates, Chunk chunk, int32_t head) {
    float sum = 0.0F;
    for (int i = 0; i < 2; ++i) {
        const auto row = static_cast<int32_t>(device::lane_index()) + 32 * i;
        if (row < chunk.tokens) {
            const int64_t token = int64_t{chunk.token} + row;
            const float g = device::load_global(gates.g + token * gates.g_token_stride +
                                                head * gates.g_head_stride);
            sum += g <= kLogDecayFloor ? kLogDecayFloor : g;
        }
    }
    return sum;
}

/// Leaves the sums of the log gates of the `Count` chunks a warp before `place`, the last first;
/// zeros beyond the first chunk.
template <int32_t Count>
HCP_DEVICE void leave_log_decays(const WalkOrder& order,
                                 const GateInputs& gates,
                                 int32_t head,
                                 int32_t place,
                                 uint32_t scratch) {
    const auto warps = static_cast<int32_t>(device::block_threads() / 32);
    const auto warp = static_cast<int32_t>(device::warp_index());
    float sums[Count];
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) {
        const int32_t at = place - 1 - (i * warps + warp);
        sums[i] = at < 0 ? 0.0F
                         : lane_log_decay(
                               gates, device::load_global(order.chunks + order.chunk_at(at)), head);
    }
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) {
#pragma unroll
        for (uint32_t mask = 16; mask > 0; mask >>= 1) {
            sums[i] += device::shuffle_xor(sums[i], mask);
        }
        if (device::lane_index() == 0) {
            device::store_shared(scratch + 4 * static_cast<uint32_t>(i * warps + warp), sums[i]);
        }
    }
}
/// The first of `count` sums with which `sum` falls below `floor`, or -1; then `sum` has all.
HCP_DEVICE int32_t find_below(float& sum, float floor, int32_t count, uint32_t scratch) {
    float all = sum;  // gates only take away, so this tells whether it is any
#pragma unroll 8
    for (int32_t i = 0; i < count; ++i) {
        all += device::load_shared<float>(scratch + 4 * static_cast<uint32_t>(i));
    }
    if (all < floor) {
        for (int32_t i = 0; i < count; ++i) {
            sum += device::load_shared<float>(scratch + 4 * static_cast<uint32_t>(i));
            if (sum < floor) {
                return i;
            }
        }
    }
    sum = all;
    return -1;
}

/// How many places before `place` are needed to know the state there: those with log gates of more
/// than `floor` between them and it; -1 if that is all of them, or more than are looked at.
/// All threads of the block call; `scratch` is shared memory for kChunksOfWarp floats a warp.
HCP_DEVICE int32_t places_that_matter(const WalkOrder& order,
                                      const GateInputs& gates,
                                      int32_t head,
                                      int32_t place,
                                      float floor,
                                      uint32_t scratch) {
    const auto warps = static_cast<int32_t>(device::block_threads() / 32);
    float sum = 0.0F;
    leave_log_decays<1>(order, gates, head, place, scratch);
    device::sync_block();
    const int32_t soon = find_below(sum, floor, warps, scratch);
    if (soon >= 0 || warps >= place) {
        return soon < 0 ? -1 : soon + 1;
    }
    device::sync_block();
    leave_log_decays<kChunksOfWarp - 1>(order, gates, head, place - warps, scratch);
    device::sync_block();
    const int32_t later = find_below(sum, floor, (kChunksOfWarp - 1) * warps, scratch);
    return later < 0 ? -1 : warps + later + 1;
}

/// Where piece `index` of `pieces` starts when `places` are cut evenly.
HCP_DEVICE int32_t piece_start(int32_t index, int32_t pieces, int32_t places) {
    return static_cast<int32_t>(int64_t{index} * places / pieces);
}
/// Where the second of two pieces starts that must know all before it, so that both take as long.
HCP_DEVICE int32_t uneven_start(int32_t places) {
    constexpr float kShare = (1.0F - kCatchUpTime) / (2.0F - kCatchUpTime);
    const auto share = static_cast<int32_t>(kShare * static_cast<float>(places));
    return places - (share > 0 ? share : 1);
}

/// All threads of the block call; `scratch` is as places_that_matter wants it.
HCP_DEVICE WalkRange find_walk_range(const WalkOrder& order,
                                     const Piece& piece,
                                     const GateInputs& gates,
                                     int32_t head,
                                     bool may_truncate,
                                     uint32_t scratch) {
    const bool in_two = piece.pieces == 2;
    WalkRange range;
    range.main = piece_start(piece.index, piece.pieces, order.count);
    range.end = piece_start(piece.index + 1, piece.pieces, order.count);
    int32_t cut = piece.index > 0 ? range.main : range.end;
    int32_t matter = -1;
    if (may_truncate && (piece.index > 0 || in_two)) {
        matter = places_that_matter(order, gates, head, cut, kForgottenLog, scratch);
    }
    if (in_two && matter < 0) {
        cut = uneven_start(order.count);
    } else if (in_two && !order.backwards) {
        // Later by what makes both take as long. Before the new cut about as many places matter.
        const auto shift = static_cast<int32_t>(kCatchUpTime / 2 * static_cast<float>(matter));
        cut += shift;
        if (piece.index > 0 && shift > 0) {
            device::sync_block();  // scratch is free
            const int32_t moved =
                places_that_matter(order, gates, head, cut, kForgottenLog, scratch);
            matter = moved < 0 ? matter + shift : moved;
        }
    }
    (piece.index > 0 ? range.main : range.end) = cut;
    range.first = piece.index == 0 || matter < 0 || matter > range.main ? 0 : range.main - matter;
    range.from_boundary = range.first == 0;
    range.is_long = matter < 0 && (piece.index > 0 || in_two);
    return range;
}

/// Whether gates between a part of a segment and the end of the segment's walk forget all of it. A
/// part is a piece whose index and pieces are the chunks before it and of all (host_tables.h).
HCP_DEVICE bool is_forgotten(const WalkOrder& part,
                             const Piece& piece,
                             const GateInputs& gates,
                             int32_t head,
                             float floor,
                             uint32_t scratch) {
    WalkOrder rest = part;
    rest.first_chunk =
        part.backwards ? part.first_chunk - piece.index : part.first_chunk + part.count;
    rest.count = part.backwards ? piece.index : piece.pieces - piece.index - part.count;
    if (rest.count <= 0) {
        return false;
    }
    const bool forgotten = places_that_matter(rest, gates, head, rest.count, floor, scratch) >= 0;
    device::sync_block();  // scratch is free
    return forgotten;
}
/// The walk of a summary: the last places that matter for the state at the end, from zeros; `first`
/// is 0 where all do. A floor of minus infinity asks for all.
HCP_DEVICE WalkRange find_summary_range(const WalkOrder& order,
                                        const Piece& piece,
                                        const GateInputs& gates,
                                        int32_t head,
                                        float floor,
                                        uint32_t scratch) {
    const int32_t matter =
        is_forgotten(order, piece, gates, head, floor, scratch)
            ? 0
            : places_that_matter(order, gates, head, order.count, floor, scratch);
    return {.first = matter < 0 ? 0 : order.count - matter,
            .main = order.count,
            .end = order.count,
            .from_boundary = false,
            .is_long = false};
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
