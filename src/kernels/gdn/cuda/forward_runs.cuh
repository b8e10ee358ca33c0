#pragma once

// Where the runs of a segment begin, and their checkpoints.

#include "kernels/gdn/cuda/forward_layout.cuh"
#include "kernels/gdn/cuda/pieces.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

/// The first run of the walk's segment that starts at chunk i of the walk or after it; the
/// segment's first run, which has no checkpoint, is none. Made where it is needed: the loops have
/// no registers to spare.
struct SegmentRun {
    int32_t index, start;  // the latter in chunks of the segment

    HCP_DEVICE SegmentRun(const ForwardParams& p, const Walk& walk, int i) {
        const RunCut& cut = p.checkpoints.cut;
        const int32_t head_class = p.checkpoints.class_of(walk.key_head);
        index = cut.run_from(walk.begin + i, head_class);
        index = index > 1 ? index : 1;
        start = cut.start(index, head_class);
    }
    /// Where it begins in the walk, or where the walk ends; the same for all lanes, as uniform has
    /// it.
    [[nodiscard]] HCP_DEVICE int begin_in(const Walk& walk) const {
        return device::shuffle(start < walk.end ? start - walk.begin : walk.count(), 0);
    }
    /// The half of a block.
    [[nodiscard]] HCP_DEVICE float* checkpoint(const ForwardParams& p,
                                               const Walk& walk,
                                               uint32_t half) const {
        const int32_t first = device::load_global(p.checkpoints.first + walk.segment);
        const int64_t at = int64_t{walk.head} * p.checkpoints.of_head + first + index - 1;
        return p.checkpoints.data + at * kCheckpointFloats + half * (kCheckpointFloats / 2);
    }
};

/// Of the chunks of each run, so many as forward keeps. Walks that end last keep nothing, unless
/// all is kept.
HCP_DEVICE int32_t kept_of_run(const ForwardParams& p, const Walk& walk) {
    const RunCut& cut = p.checkpoints.cut;
    return walk.is_long && cut.kept < cut.length ? 0 : cut.kept;
}
/// Which chunks of a walk forward keeps, asked in their order.
struct KeptChunks {
    int first = 0, stop = 0;  // of the run that was asked for last

    HCP_DEVICE void go_to(const ForwardParams& p, const Walk& walk, int i) {
        if (i >= stop) {
            const SegmentRun next(p, walk, i + 1);
            stop = next.begin_in(walk);
            const int kept = next.start - walk.begin - kept_of_run(p, walk);
            first = device::shuffle(kept < stop ? kept : stop, 0);
        }
    }
};

HCP_DEVICE uint8_t* kept_marks(const ForwardParams& p, const Walk& walk) {
    return p.kept + int64_t{walk.head} * p.shape.num_chunks + walk.global_chunk(0);
}
/// Leaves for remaking which chunks of the piece forward keeps. By a warp.
HCP_DEVICE void mark_kept(const ForwardParams& p, const Walk& walk) {
    const bool any = kept_of_run(p, walk) > 0;
    const int32_t head_class = p.checkpoints.class_of(walk.key_head);
#pragma unroll 1
    for (auto i = walk.catch_up() + static_cast<int>(device::lane_index()); i < walk.count();
         i += 32) {
        const bool kept = any && p.checkpoints.cut.keeps(walk.begin + i, head_class);
        device::store_global(kept_marks(p, walk) + i, static_cast<uint8_t>(kept ? 1 : 0));
    }
}
/// How many chunks of a run are to be made again: all up to the last that forward did not keep.
HCP_DEVICE int32_t unkept_chunks(const ForwardParams& p, const Walk& run) {
    constexpr int32_t kLanes = 32, kLoads = 4;
    int32_t count = run.count();
    for (bool all = p.kept != nullptr; all && count > 0;) {
        int32_t last = 0;
#pragma unroll
        for (int32_t load = kLoads; load > 0; --load) {
            const int32_t i = count - load * kLanes + static_cast<int32_t>(device::lane_index());
            last = i >= 0 && device::load_global(kept_marks(p, run) + i) == 0 ? i + 1 : last;
        }
#pragma unroll
        for (uint32_t mask = 16; mask > 0; mask >>= 1) {
            const int32_t other = device::shuffle_xor(last, mask);
            last = other > last ? other : last;
        }
        all = last == 0;
        count = all ? count - kLoads * kLanes : last;
    }
    return count > 0 ? count : 0;
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
