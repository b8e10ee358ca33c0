#pragma once

// Which chunks a cluster walks: those of its piece, and before them as many as its entry state
// needs (docs/gdn-cuda.md, "Pieces").

#include "kernels/gdn/cuda/gates.cuh"

namespace hybridcp::gdn::cuda {

/// What lies beyond this sum of log gates does not show in a state.
constexpr float kForgotten = -18.0F;
/// Chunks before a piece whose gates are looked at.
constexpr int kLookback = 80;
/// A chunk without output takes so much less time that a piece which walks from the segment's start
/// gets this share of what is left to it and those behind it.
constexpr float kUnevenShare = 0.6F;

/// Chunks are counted from the segment's first.
struct Walk {
    int32_t segment, head, key_head;
    bool first_of_key_head;       // among its value heads
    int32_t first_token, tokens;  // of the segment
    int32_t first_chunk;          // of the segment, among all
    int32_t begin;                // where the walk begins
    int32_t main;                 // the piece itself: [main, end)
    int32_t end;
    bool from_start;  // begins with the segment's start state rather than zeros
    bool to_end;      // ends with the segment's end state

    HCP_DEVICE int count() const { return end - begin; }
    HCP_DEVICE int catch_up() const { return main - begin; }
    /// The i-th chunk of the walk.
    HCP_DEVICE Chunk chunk(int i) const {
        const int32_t offset = (begin + i) * kChunkTokens;
        const int32_t left = tokens - offset;
        return {first_token + offset, left < kChunkTokens ? left : kChunkTokens};
    }
    HCP_DEVICE int64_t global_chunk(int i) const { return int64_t{first_chunk} + begin + i; }
};

/// Where piece `index` begins: an even cut, or one where each piece has less than the one before.
HCP_DEVICE int32_t piece_begin(const Piece& piece, int32_t index, bool even) {
    if (index <= 0 || index >= piece.pieces) {
        return index <= 0 ? 0 : piece.chunks;
    }
    if (even) {
        return static_cast<int32_t>(int64_t{index} * piece.chunks / piece.pieces);
    }
    float left = 1.0F, left_here = 1.0F;
    for (int32_t i = 0; i < piece.pieces; ++i) {
        left *= 1.0F - kUnevenShare;
        left_here = i + 1 == index ? left : left_here;
    }
    const float share = (1.0F - left_here) / (1.0F - left);
    const auto begin = static_cast<int32_t>(static_cast<float>(piece.chunks) * share + 0.5F);
    return begin < piece.chunks ? begin : piece.chunks;
}

/// How many of the chunks before `chunk` it takes until the gates have forgotten; `kLookback + 1`
/// if that is more than kLookback. If they reach the segment's start first: all. The block's warps
/// share the work; all threads call. `sums`: kLookback words of shared memory.
template <int Warps>
HCP_DEVICE int32_t
chunks_remembered(const GateInputs& gates, const Walk& segment, int32_t chunk, uint32_t sums) {
    constexpr int kRounds = (kLookback + Warps - 1) / Warps;
    const auto warp = static_cast<int32_t>(device::warp_index());
    RawGates raw[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        const int32_t back = round * Warps + warp;
        raw[round] = {{0.0F, 0.0F}, {0.0F, 0.0F}};
        if (back < chunk && back < kLookback) {
            raw[round] = load_gates(gates, segment.chunk(chunk - 1 - back), segment.head);
        }
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        const float sum = scan_gates(raw[round]).all;
        if (device::lane_index() == 0 && round * Warps + warp < kLookback) {
            device::store_shared(sums + 4 * (round * Warps + warp), sum);
        }
    }
    device::sync_block();
    const int32_t most = chunk < kLookback ? chunk : kLookback;
    float sum = 0.0F;
    int32_t back = 0;
    while (back < most && !(sum < kForgotten * kLog2E)) {
        sum += device::load_shared<float>(sums + 4 * back);
        ++back;
    }
    device::sync_block();
    return sum < kForgotten * kLog2E || back == chunk ? back : kLookback + 1;
}

HCP_DEVICE Piece load_piece(const Piece* piece) {
    return {device::load_global(&piece->segment), device::load_global(&piece->first_chunk),
            device::load_global(&piece->chunks), device::load_global(&piece->index),
            device::load_global(&piece->pieces)};
}

HCP_DEVICE Walk begin_walk(const Piece& piece,
                           const Shape& shape,
                           const Chunk* chunks,
                           int32_t head) {
    const Chunk first = device::load_global(chunks + piece.first_chunk);
    const Chunk last = device::load_global(chunks + piece.first_chunk + piece.chunks - 1);
    Walk walk = {};
    walk.segment = piece.segment;
    walk.head = head;
    walk.key_head = head / shape.group();
    walk.first_of_key_head = walk.key_head * shape.group() == head;
    walk.first_token = first.token;
    walk.tokens = last.token + last.tokens - first.token;
    walk.first_chunk = piece.first_chunk;
    return walk;
}

/// The walk of a piece. All pieces of a segment and head come to the same cut: even, unless one of
/// them has to walk from the segment's start. All threads of the block call.
template <int Warps>
HCP_DEVICE Walk walk_piece(
    const Piece& piece, Walk walk, const GateInputs& gates, bool may_truncate, uint32_t sums) {
    bool even = may_truncate;
    int32_t back = 0;
    for (int32_t index = 1; may_truncate && index < piece.pieces; ++index) {
        const int32_t remembered =
            chunks_remembered<Warps>(gates, walk, piece_begin(piece, index, true), sums);
        even = even && remembered <= kLookback;
        back = index == piece.index ? remembered : back;
    }
    walk.main = piece_begin(piece, piece.index, even);
    walk.end = piece_begin(piece, piece.index + 1, even);
    walk.begin = even ? walk.main - back : 0;
    if (walk.main >= walk.end) {  // nothing is left for this one
        walk.begin = walk.end = walk.main;
    }
    walk.from_start = walk.begin == 0;
    walk.to_end = walk.end == piece.chunks && walk.main < walk.end;
    return walk;
}

/// The walk of a whole segment for its end state alone: from as far back as the gates reach.
template <int Warps>
HCP_DEVICE Walk walk_summary(
    const Piece& piece, Walk walk, const GateInputs& gates, bool may_truncate, uint32_t sums) {
    int32_t back = piece.chunks;
    if (may_truncate) {
        const int32_t remembered = chunks_remembered<Warps>(gates, walk, piece.chunks, sums);
        back = remembered <= kLookback ? remembered : piece.chunks;
    }
    walk.begin = piece.chunks - back;
    walk.main = walk.end = piece.chunks;
    walk.from_start = walk.begin == 0;
    walk.to_end = true;
    return walk;
}

}  // namespace hybridcp::gdn::cuda
