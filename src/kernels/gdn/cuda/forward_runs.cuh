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
        const int32_t runs = p.checkpoints.data != nullptr
                                 ? device::load_global(&p.checkpoints.segments[walk.segment].runs)
                                 : 1;
        const RunCut cut((walk.tokens + kChunkTokens - 1) / kChunkTokens, runs);
        index = cut.run_from(walk.begin + i);
        index = index > 1 ? index : 1;
        start = cut.start(index);
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
        const int32_t first =
            device::load_global(&p.checkpoints.segments[walk.segment].first_checkpoint);
        const int64_t at = int64_t{walk.head} * p.checkpoints.of_head + first + index - 1;
        return p.checkpoints.data + at * kCheckpointFloats + half * (kCheckpointFloats / 2);
    }
};

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
