// How much of each segment a summary has to walk. A token reaches the end of its segment (for S),
// and a gradient its start (for dS), only through the decay in between: where that is below e^floor
// the token leaves no trace (docs/kernels.md, summaries). A *lane* is one segment and value head.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/gdn/chunk_layout.h"

namespace hybridcp::gdn {

struct Lane {
    std::int64_t place = 0;   // of the segment in the chunk layout
    std::int64_t head = 0;    // value head
    std::int64_t chunks = 0;  // of the segment
    std::int64_t kept = 0;    // chunks to walk: the last ones for S, the first ones for dS
};

class SummaryWindows {
  public:
    SummaryWindows() = default;
    /// log_decay: [chunks * heads] fp64 on the CPU, the summed log decay of each chunk.
    SummaryWindows(const ChunkLayout& layout,
                   const at::Tensor& log_decay,
                   std::int64_t num_heads,
                   double floor);

    /// Lanes whose end state depends on the start state, and those where it does not (M = 0), each
    /// longest first.
    [[nodiscard]] const std::vector<Lane>& dependent() const { return dependent_; }
    [[nodiscard]] const std::vector<Lane>& independent() const { return independent_; }
    /// All lanes, with the chunks that dS needs.
    [[nodiscard]] const std::vector<Lane>& prefixes() const { return prefixes_; }
    /// Whether a walk over all chunks is all the same.
    [[nodiscard]] bool forward_is_whole() const { return independent_.empty(); }
    [[nodiscard]] bool reverse_is_whole() const { return reverse_is_whole_; }
    /// Per segment (in the caller's order) and head, [N * heads].
    [[nodiscard]] const std::vector<bool>& independent_heads() const { return independent_heads_; }

  private:
    std::vector<Lane> dependent_, independent_, prefixes_;
    std::vector<bool> independent_heads_;
    bool reverse_is_whole_ = true;
};

}  // namespace hybridcp::gdn
