#pragma once

// Segments cut into chunks, and into pieces that are walked at once. No torch.

#include <cstdint>
#include <vector>

#include "kernels/gdn/cuda/runs.h"

namespace hybridcp::gdn {

/// Chunks of all segments in order, and pieces so that `multiprocessors` have work: a block for
/// each piece, value head and half of V. Longest pieces and runs (tables.h) first.
struct HostTables {
    std::vector<cuda::Chunk> chunks;
    std::vector<cuda::Piece> pieces, whole_segments;
    cuda::RunCut cut{1, 0};
    std::vector<cuda::Run> runs;
    /// For summaries a long segment is cut in parts at slots of their own behind the segments.
    /// Their index and pieces say where in the segment they are: chunks before them, and of all.
    std::vector<cuda::Piece> summary_parts;
    std::vector<cuda::Join> joins;
    std::int32_t num_slots = 0;  // of segments and parts
    std::vector<std::int64_t> empty_segments;
    std::vector<std::int32_t> first_checkpoints;  // of segments
    std::int32_t num_checkpoints = 0;             // of a head
};
/// A segment of `chunks_of_two_summary_parts` or more is cut in parts for summaries. Forward keeps
/// `kept_share` of each run.
[[nodiscard]] HostTables make_host_tables(
    const std::vector<std::int64_t>& offsets,
    std::int64_t value_heads,
    int multiprocessors,
    std::int64_t chunks_of_two_summary_parts = cuda::kChunksOfTwoSummaryParts,
    double kept_share = 0.0);

}  // namespace hybridcp::gdn
