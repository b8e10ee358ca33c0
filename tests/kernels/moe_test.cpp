// The mixture-of-experts feed-forward: golden file, and routings that a random one never has.
#include "kernels/moe/moe.h"

#include <gtest/gtest.h>

#include "hybridcp/error.h"
#include "kernels/comparison.h"
#include "kernels/moe/experts.h"

namespace hybridcp {
namespace {

using namespace testing;

using Tensors = std::vector<at::Tensor>;

/// x and the weights in the order of `kNames`.
const std::vector<std::string> kNames{
    "x",           "router",    "gate_up",     "down",
    "shared_gate", "shared_up", "shared_down", "shared_expert_gate"};

MoeOutput run_block(const Tensors& t, std::int64_t num_chosen) {
    return moe_block(t[0],
                     {.router = t[1],
                      .gate_up = t[2],
                      .down = t[3],
                      .shared_gate = t[4],
                      .shared_up = t[5],
                      .shared_down = t[6],
                      .shared_expert_gate = t[7]},
                     num_chosen);
}

TEST(MoeBlock, Golden) {
    const SafetensorsFile file = open_golden("moe/e8_k2_block");
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
        Tensors inputs;
        for (const std::string& name : kNames) {
            inputs.push_back(leaf(file.read(name).to(dtype)));
        }
        const MoeOutput out = run_block(inputs, 2);
        EXPECT_TRUE(at::equal(out.routing.experts, file.read("topk_index")));
        EXPECT_LE(relative_l2(out.y, file.read("y")), kOutputBar);
        const auto gradients = gradients_of(out.y, file.read("dy").to(dtype), inputs);
        for (std::size_t i = 0; i < kNames.size(); ++i) {
            EXPECT_LE(relative_l2(gradients[i], file.read("d" + kNames[i])), kGradientBar)
                << kNames[i];
        }
        EXPECT_EQ(gradients[2][7].abs().max().item<double>(), 0.0) << "nobody chose it";
        EXPECT_EQ(gradients[3][7].abs().max().item<double>(), 0.0);
    }
}

/// The experts' sum by its definition: every expert on every token, in fp64.
at::Tensor definition(const Tensors& t, const at::Tensor& experts) {
    const at::Tensor &x = t[0], &weights = t[1], &gate_up = t[2], &down = t[3];
    const std::int64_t width = down.size(2);
    at::Tensor y = at::zeros_like(x);
    for (std::int64_t expert = 0; expert < down.size(0); ++expert) {
        const at::Tensor share = (weights * experts.eq(expert)).sum(1, true);  // [T, 1]
        const at::Tensor a = x.matmul(gate_up[expert].narrow(0, 0, width).t());
        const at::Tensor b = x.matmul(gate_up[expert].narrow(0, width, width).t());
        y = y + share * (a * a.sigmoid() * b).matmul(down[expert].t());
    }
    return y;
}

constexpr std::int64_t kExperts = 6, kWidth = 9, kHidden = 7;

/// x, weights, gate_up, down.
Tensors random_inputs(std::int64_t num_tokens, std::int64_t num_chosen, at::ScalarType dtype) {
    return {random_normal({num_tokens, kHidden}, 1, dtype),
            random_normal({num_tokens, num_chosen}, 2).abs().to(dtype),
            random_normal({kExperts, 2 * kWidth, kHidden}, 3, dtype),
            random_normal({kExperts, kHidden, kWidth}, 4, dtype)};
}

at::Tensor run_experts(const Tensors& t, const at::Tensor& experts) {
    const at::Tensor flat = experts.flatten();
    const at::Tensor counts =
        flat.numel() > 0 ? at::bincount(flat, {}, kExperts) : at::zeros({kExperts}, at::kLong);
    return expert_mlp(
        t[0], {.experts = experts, .weights = t[1], .counts = counts, .probability_sums = {}}, t[2],
        t[3]);
}

/// Compares value and all gradients with the definition in fp64; returns the gradients.
Tensors expect_definition(const at::Tensor& experts,
                          at::ScalarType dtype,
                          double output_bar,
                          double gradient_bar) {
    Tensors inputs, wide;
    for (const at::Tensor& value : random_inputs(experts.size(0), experts.size(1), dtype)) {
        inputs.push_back(leaf(value));
        wide.push_back(leaf(value.to(at::kDouble)));
    }
    const at::Tensor y = run_experts(inputs, experts), reference = definition(wide, experts);
    EXPECT_EQ(y.scalar_type(), dtype);
    const at::Tensor dy = random_normal(y.sizes(), 5, dtype);
    EXPECT_LE(relative_l2(y, reference), output_bar);
    const Tensors gradients = gradients_of(y, dy, inputs);
    const Tensors expected = gradients_of(reference, dy.to(at::kDouble), wide);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        EXPECT_EQ(gradients[i].scalar_type(), inputs[i].scalar_type());
        EXPECT_LE(relative_l2(gradients[i], expected[i]), gradient_bar) << i;
    }
    return gradients;
}

/// Distinct choices: token t takes t, t + 1, ... modulo the first `num_used` experts.
at::Tensor round_robin(std::int64_t num_tokens, std::int64_t num_chosen, std::int64_t num_used) {
    return (at::arange(num_tokens, at::kLong).unsqueeze(1) * 5 + at::arange(num_chosen, at::kLong))
        .remainder(num_used);
}

TEST(MoeExperts, EqualTheDefinition) {
    for (const std::int64_t num_tokens : {0, 1, 2, 63, 65}) {
        for (const std::int64_t num_chosen : {1, 2, 6}) {
            SCOPED_TRACE(fmt::format("{} tokens, {} experts each", num_tokens, num_chosen));
            const at::Tensor experts = round_robin(num_tokens, num_chosen, kExperts);
            expect_definition(experts, at::kFloat, kOutputBar, kGradientBar);
            expect_definition(experts, at::kDouble, 1e-14, 1e-14);
        }
    }
}

TEST(MoeExperts, AllTokensToOneExpert) {
    for (const std::int64_t expert : {0, 3, 5}) {
        const Tensors gradients = expect_definition(at::full({33, 1}, expert, at::kLong),
                                                    at::kFloat, kOutputBar, kGradientBar);
        for (std::int64_t other = 0; other < kExperts; ++other) {
            const double largest = gradients[2][other].abs().max().item<double>();
            EXPECT_EQ(largest == 0.0, other != expert) << other;
        }
    }
}

TEST(MoeExperts, ExpertsThatNobodyChoseHaveZeroGradients) {
    const Tensors gradients =
        expect_definition(round_robin(40, 2, 4), at::kFloat, kOutputBar, kGradientBar);
    for (const std::size_t weight : {std::size_t{2}, std::size_t{3}}) {
        EXPECT_EQ(gradients[weight].narrow(0, 4, 2).abs().max().item<double>(), 0.0);
        EXPECT_GT(gradients[weight][3].abs().max().item<double>(), 0.0);
    }
}

TEST(MoeExperts, Bf16) {
    expect_definition(round_robin(65, 3, kExperts), at::kBFloat16, kBf16Bar, kBf16Bar);
}

// As a model trains: activations in bf16, weights in fp32, their gradients never rounded.
TEST(MoeExperts, GradientsOfFp32WeightsAreNotRounded) {
    Tensors inputs = random_inputs(65, 2, at::kBFloat16);
    for (const std::size_t weight : {std::size_t{2}, std::size_t{3}}) {
        inputs[weight] = leaf(inputs[weight].to(at::kFloat));
    }
    const at::Tensor experts = round_robin(65, 2, kExperts);
    const at::Tensor y = run_experts(inputs, experts);
    const at::Tensor dy = random_normal(y.sizes(), 5, at::kBFloat16);
    const Tensors gradients = gradients_of(y, dy, {inputs[2], inputs[3]});
    for (const at::Tensor& gradient : gradients) {
        EXPECT_EQ(gradient.scalar_type(), at::kFloat);
        EXPECT_FALSE(at::equal(gradient, gradient.to(at::kBFloat16).to(at::kFloat)));
    }
}

TEST(MoeExperts, TheSameBitsEveryTimeAndForEachTokenAlone) {
    const at::Tensor experts = round_robin(65, 3, kExperts);
    const Tensors inputs = random_inputs(65, 3, at::kDouble);
    const at::Tensor y = run_experts(inputs, experts);
    EXPECT_TRUE(at::equal(y, run_experts(inputs, experts)));
    for (const std::int64_t token : {0, 31, 64}) {
        const at::Tensor alone = run_experts(
            {inputs[0].narrow(0, token, 1), inputs[1].narrow(0, token, 1), inputs[2], inputs[3]},
            experts.narrow(0, token, 1));
        EXPECT_TRUE(at::allclose(alone, y.narrow(0, token, 1), 1e-13, 1e-14)) << token;
    }
}

TEST(MoeExperts, GradientsByDifferences) {
    const at::Tensor experts = round_robin(5, 2, kExperts);
    expect_gradients_by_differences([&](const Tensors& t) { return run_experts(t, experts); },
                                    random_inputs(5, 2, at::kDouble));
}

TEST(MoeBlock, NoTokens) {
    const SafetensorsFile file = open_golden("moe/e8_k2_block");
    Tensors inputs;
    for (const std::string& name : kNames) {
        inputs.push_back(leaf(file.read(name)));
    }
    inputs[0] = leaf(at::zeros({0, inputs[0].size(1)}));
    const MoeOutput out = run_block(inputs, 2);
    EXPECT_EQ(out.y.sizes(), inputs[0].sizes());
    for (const at::Tensor& gradient : gradients_of(out.y, at::zeros_like(out.y), inputs)) {
        EXPECT_EQ(gradient.abs().sum().item<double>(), 0.0);
    }
}

TEST(MoeExperts, RefusesWhatDoesNotFit) {
    const at::Tensor experts = round_robin(4, 2, kExperts);
    const Tensors t = random_inputs(4, 2, at::kFloat);
    EXPECT_THROW((void)run_experts({t[0], t[1], t[3], t[2]}, experts), UsageError);
    EXPECT_THROW((void)run_experts({t[0].narrow(1, 0, 3), t[1], t[2], t[3]}, experts), UsageError);
    EXPECT_THROW((void)run_experts({t[0], t[1], t[2].narrow(0, 0, 3), t[3]}, experts), UsageError);
    EXPECT_THROW((void)run_experts({t[0].narrow(0, 0, 3), t[1], t[2], t[3]}, experts), UsageError);
    EXPECT_THROW((void)run_experts({t[0], t[1].narrow(1, 0, 1), t[2], t[3]}, experts), UsageError);
}

}  // namespace
}  // namespace hybridcp
