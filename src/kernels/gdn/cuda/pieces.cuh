#pragma once

// Which chunks a cluster walks: those of its run; or those of its piece, and before them as many as
// its entry state needs (docs/gdn-cuda.md, "Pieces").

#include "kernels/gdn/cuda/walk_range.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

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
    bool is_long;     // has far more chunks before its piece than the gates of others ask for

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

/// The same, so that the compiler sees that all lanes have it: loops over it then keep addresses of
/// products and branches out of the lanes' registers.
HCP_DEVICE Walk uniform(Walk walk) {
    const auto broadcast = [](int32_t& value) { value = device::shuffle(value, 0); };
    broadcast(walk.segment);
    broadcast(walk.head);
    broadcast(walk.key_head);
    broadcast(walk.first_token);
    broadcast(walk.tokens);
    broadcast(walk.first_chunk);
    broadcast(walk.begin);
    broadcast(walk.main);
    broadcast(walk.end);
    const int32_t flags =
        device::shuffle((walk.first_of_key_head ? 1 : 0) | (walk.from_start ? 2 : 0) |
                            (walk.to_end ? 4 : 0) | (walk.is_long ? 8 : 0),
                        0);
    walk.first_of_key_head = (flags & 1) != 0;
    walk.from_start = (flags & 2) != 0;
    walk.to_end = (flags & 4) != 0;
    walk.is_long = (flags & 8) != 0;
    return walk;
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

HCP_DEVICE Walk walk_of(Walk walk, const WalkRange& range, int32_t chunks) {
    walk.begin = range.first;
    walk.main = range.main;
    walk.end = range.end;
    walk.from_start = range.first == 0;
    walk.to_end = range.end == chunks;
    walk.is_long = range.is_long;
    return walk;
}

/// The walk of a piece. All threads of the block call, as in walk_range.cuh.
HCP_DEVICE Walk walk_piece(const Piece& piece,
                           const Walk& walk,
                           const WalkOrder& order,
                           const GateInputs& gates,
                           bool may_truncate,
                           uint32_t scratch) {
    return walk_of(walk, find_walk_range(order, piece, gates, walk.head, may_truncate, scratch),
                   piece.chunks);
}

/// The walk of a run of its segment.
HCP_DEVICE Walk walk_run(const Run& run, const Walk& walk, const Checkpoints& checkpoints) {
    const int32_t first = checkpoints.cut.start(run.index, run.head_class);
    const int32_t next = checkpoints.cut.start(run.index + 1, run.head_class);
    return walk_of(walk,
                   {.first = first,
                    .main = first,
                    .end = next < run.chunks ? next : run.chunks,
                    .from_boundary = first == 0,
                    .is_long = false},
                   run.chunks);
}

/// The walk of a whole segment for its end state alone: from as far back as the gates reach.
HCP_DEVICE Walk walk_summary(const Piece& piece,
                             const Walk& walk,
                             const WalkOrder& order,
                             const GateInputs& gates,
                             float floor,
                             uint32_t scratch) {
    return walk_of(walk, find_summary_range(order, piece, gates, walk.head, floor, scratch),
                   piece.chunks);
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
