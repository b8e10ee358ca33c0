#include "ops/gdn_cases.h"

#include <gtest/gtest.h>

namespace hybridcp::testing {

at::Tensor random(std::vector<std::int64_t> shape) {
    return at::randn(shape, at::TensorOptions().dtype(at::kFloat));
}

std::vector<at::Tensor> to_double(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> result;
    for (const at::Tensor& tensor : tensors) {
        result.push_back(tensor.to(at::kDouble).detach().requires_grad_(true));
    }
    return result;
}

Expected run_whole(const OpInputs& inputs,
                   const std::function<at::Tensor(const std::vector<at::Tensor>&)>& op) {
    std::vector<at::Tensor> all = inputs.tokens;
    all.insert(all.end(), inputs.weights.begin(), inputs.weights.end());
    all = to_double(all);
    const at::Tensor output = op(all);
    (output * inputs.d_output.to(at::kDouble)).sum().backward();
    Expected expected{.output = output.detach(), .gradients = {}};
    for (const at::Tensor& leaf : all) {
        expected.gradients.push_back(leaf.grad().defined() ? leaf.grad() : at::zeros_like(leaf));
    }
    return expected;
}

OpInputs gdn_inputs(std::int64_t T, const GdnHeads& heads) {
    constexpr std::int64_t kKeyDim = 8;
    constexpr std::int64_t kValueDim = 6;
    const at::Tensor rate = at::rand({heads.value_heads}) * 2.0;  // decay speeds from none to fast
    return {.tokens = {random({T, heads.key_heads, kKeyDim}), random({T, heads.key_heads, kKeyDim}),
                       random({T, heads.value_heads, kValueDim}),
                       -at::rand({T, heads.value_heads}) * rate, at::rand({T, heads.value_heads})},
            .weights = {},
            .d_output = random({T, heads.value_heads, kValueDim})};
}

GdnInputs as_gdn(const std::vector<at::Tensor>& x) {
    return {.q = x[0], .k = x[1], .v = x[2], .g = x[3], .beta = x[4]};
}

GdnShards as_gdn_shards(const std::vector<at::Tensor>& x, const CpContext& context) {
    return {.q = shard(x[0], context),
            .k = shard(x[1], context),
            .v = shard(x[2], context),
            .g = shard(x[3], context),
            .beta = shard(x[4], context)};
}

Expected gdn_recurrence(const OpInputs& inputs, const std::vector<std::int64_t>& offsets) {
    const auto call = make_gdn_call(GdnBackend::kReference, as_gdn(to_double(inputs.tokens)),
                                    offsets, GdnOptions{});
    const GdnOutput output = call->forward(at::Tensor());
    const GdnGradients gradients = call->backward(inputs.d_output.to(at::kDouble), at::Tensor());
    return {.output = output.o,
            .gradients = {gradients.dq, gradients.dk, gradients.dv, gradients.dg, gradients.dbeta}};
}

void expect_gdn(const ShardedRun& run, const Expected& expected) {
    const std::array<const char*, 5> names{"dq", "dk", "dv", "dg", "dbeta"};
    EXPECT_LE(worst_head_error(run.output, expected.output), kGdnBar) << "o";
    for (std::size_t i = 0; i < names.size(); ++i) {
        EXPECT_LE(worst_head_error(run.gradients[i], expected.gradients[i]), kGdnBar) << names[i];
    }
}

at::Tensor gdn_op(const std::vector<at::Tensor>& x, const CpContext& context) {
    return gated_delta_rule_cp(as_gdn_shards(x, context), GdnOptions{.chunk_size = 16}, context)
        .o.local;
}

}  // namespace hybridcp::testing
