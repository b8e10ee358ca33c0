// Moving between sequence shards (all heads of some tokens) and head shards (all tokens of some
// heads): the exchange of the `ulysses` modes. The two directions are each other's adjoint, so each
// is the other's backward. Legend: T_local tokens of this rank, T all tokens in flat order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ops/context_parallel.h"

namespace hybridcp {

/// The heads [begin, begin + count) that each rank holds of one tensor. Ranges may overlap (shared
/// key heads).
struct HeadRange {
    std::int64_t begin = 0;
    std::int64_t count = 0;
};
using HeadShards = std::vector<HeadRange>;  // one per rank

/// Rank r holds heads [r * num_heads / P, (r + 1) * num_heads / P).
[[nodiscard]] HeadShards split_heads(std::int64_t num_heads, int num_ranks);

/// The key (or KV) heads that the shards of `query_shards` read, where query head h reads head h /
/// group_size.
[[nodiscard]] HeadShards shared_heads(const HeadShards& query_shards, std::int64_t group_size);

/// Which of a rank's shared heads each of its query heads reads, [query heads] int64 made on the
/// device without a copy from the host; undefined when that is the plain grouping h / (query heads
/// / shared heads), which the kernels know.
struct HeadGrouping {
    std::int64_t group_size = 1;  // query heads a shared head
    at::Device device = at::kCPU;
};
[[nodiscard]] at::Tensor shared_head_index(const HeadShards& query_shards,
                                           const HeadShards& shared_shards,
                                           int rank,
                                           const HeadGrouping& grouping);

/// [T_local, H_i, D_i] each -> [T, count_i, D_i] each. Differentiable; gradients of heads that
/// several ranks hold are summed in rank order. Comm: one all-to-all per dtype among the tensors,
/// T_local * sum_i (heads of other ranks) * D_i elements.
[[nodiscard]] std::vector<at::Tensor> scatter_heads(const std::vector<at::Tensor>& tensors,
                                                    const std::vector<HeadShards>& shards,
                                                    const std::string& op,
                                                    const CpContext& context);

/// The reverse: [T, count_i, D_i] each -> [T_local, H_i, D_i] each; heads held by several ranks are
/// summed.
[[nodiscard]] std::vector<at::Tensor> gather_heads(const std::vector<at::Tensor>& tensors,
                                                   const std::vector<HeadShards>& shards,
                                                   const std::string& op,
                                                   const CpContext& context);

}  // namespace hybridcp
