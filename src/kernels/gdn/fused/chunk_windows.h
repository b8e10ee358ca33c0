// How many chunks of a segment a summary has to walk (docs/kernels.md, "Segments"): the last ones
// for S, the first ones for dS.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace hybridcp::gdn {

/// Per segment and value head, [N * Hv].
struct ChunkWindows {
    std::vector<std::int64_t> first_chunk;   // where S starts; 0 where M is needed
    std::vector<std::int64_t> prefix_count;  // chunks that dS walks
    std::vector<bool> independent;           // the end state does not depend on the start: M = 0
};

/// g: [T, Hv] fp32 on the CPU, rows dense. A chunk is left out when the log decay between it and
/// the end (dS: the start) sums to less than `floor`.
[[nodiscard]] ChunkWindows make_chunk_windows(const at::Tensor& g,
                                              const std::vector<std::int64_t>& offsets,
                                              std::int64_t chunk_tokens,
                                              double floor);

}  // namespace hybridcp::gdn
