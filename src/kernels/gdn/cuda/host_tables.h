#pragma once

// Segments cut into chunks, and into pieces that are walked at once. No torch.

#include <cstdint>
#include <vector>

#include "kernels/gdn/cuda/tables.h"

namespace hybridcp::gdn {

/// Chunks of all segments in order, and pieces so that `multiprocessors` have work: a block for
/// each piece, value head and half of V. Runs (tables.h) are pieces whose entry state is kept.
/// Longest pieces first.
struct HostTables {
    std::vector<cuda::Chunk> chunks;
    std::vector<cuda::Piece> pieces, whole_segments, runs;
    std::vector<std::int64_t> empty_segments;
    std::vector<cuda::SegmentRuns> segment_runs;
    std::int32_t num_checkpoints = 0;  // of a head
};
[[nodiscard]] HostTables make_host_tables(const std::vector<std::int64_t>& offsets,
                                          std::int64_t value_heads,
                                          int multiprocessors);

}  // namespace hybridcp::gdn
