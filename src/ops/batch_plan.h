// Everything that the ops of one rank need to know about one batch, computed once from its Layout:
// segment offsets, exchanges, positions, attention blocks, permutations. Built on the host; no op
// computes metadata of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "hybridcp/layout.h"
#include "kernels/attention/attention.h"
#include "layout/exchange.h"

namespace hybridcp {

struct BatchPlan {
    Layout layout;
    int rank = 0;
    std::vector<std::int64_t> tokens_per_rank;  // [P]
    std::vector<std::int64_t> segment_offsets;  // of the local segments, [N + 1]
    HaloExchange halo;
    StateExchange states;
    SummaryGather prefix;                         // for state summaries
    SummaryGather suffix;                         // for gradient summaries
    std::vector<AttentionBlock> local_blocks;     // local queries against keys in flat order
    std::vector<AttentionBlock> document_blocks;  // all queries against all keys, flat order
    at::Tensor positions;                         // [T_local] int64, position in its document
    at::Tensor flat_indices;                      // [T_local] int64, index in the flat order
    at::Tensor rank_major_to_flat;                // [T] int64, or undefined for the identity
    at::Tensor flat_to_rank_major;                // its inverse

    [[nodiscard]] std::int64_t num_local_tokens() const { return segment_offsets.back(); }
};

[[nodiscard]] BatchPlan make_batch_plan(const Layout& layout,
                                        int rank,
                                        int conv_width,
                                        const at::Device& device);

}  // namespace hybridcp
