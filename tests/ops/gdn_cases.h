// Gated DeltaNet inputs for tests over ranks, and the fp64 recurrence over whole documents that
// they are compared with.
#pragma once

#include "ops/sharded_run.h"

namespace hybridcp::testing {

inline constexpr double kGdnBar = 1e-5;  // golden bars: gdn, plain regimes

[[nodiscard]] at::Tensor random(std::vector<std::int64_t> shape);
[[nodiscard]] std::vector<at::Tensor> to_double(const std::vector<at::Tensor>& tensors);

struct Expected {
    at::Tensor output;
    std::vector<at::Tensor> gradients;
};
/// fp64 autograd of an op over whole documents.
[[nodiscard]] Expected run_whole(
    const OpInputs& inputs, const std::function<at::Tensor(const std::vector<at::Tensor>&)>& op);

struct GdnHeads {
    std::int64_t key_heads;
    std::int64_t value_heads;
};
/// q, k, v, g, beta; heads decay at speeds from none to fast.
[[nodiscard]] OpInputs gdn_inputs(std::int64_t T, const GdnHeads& heads);
[[nodiscard]] GdnInputs as_gdn(const std::vector<at::Tensor>& x);
[[nodiscard]] GdnShards as_gdn_shards(const std::vector<at::Tensor>& x, const CpContext& context);
[[nodiscard]] Expected gdn_recurrence(const OpInputs& inputs,
                                      const std::vector<std::int64_t>& offsets);
/// Compares output and gradients per head.
void expect_gdn(const ShardedRun& run, const Expected& expected);
[[nodiscard]] at::Tensor gdn_op(const std::vector<at::Tensor>& x, const CpContext& context);

}  // namespace hybridcp::testing
