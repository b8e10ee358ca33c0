// The router and the load-balancing loss: golden files, ties, and gradients.
#include "kernels/moe/router.h"

#include <gtest/gtest.h>

#include <limits>

#include "hybridcp/error.h"
#include "kernels/comparison.h"
#include "kernels/linear/linear.h"

namespace hybridcp {
namespace {

using namespace testing;

constexpr double kAuxGradientBar = 1e-5;  // golden/README.md section 8

TEST(MoeRouter, Golden) {
    const SafetensorsFile file = open_golden("moe/e8_k2_router");
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
        const at::Tensor x = leaf(file.read("x").to(dtype));
        const at::Tensor router = leaf(file.read("router").to(dtype));
        const at::Tensor logits = linear_projection(x, router);
        const Routing routing = route(logits, 2);
        EXPECT_LE(relative_l2(logits, file.read("logits")), kOutputBar);
        EXPECT_LE(relative_l2(router_probabilities(logits), file.read("probs")), kOutputBar);
        EXPECT_TRUE(at::equal(routing.experts, file.read("topk_index")));
        EXPECT_LE(relative_l2(routing.weights, file.read("topk_weight")), kOutputBar);
        const auto gradients =
            gradients_of(routing.weights, file.read("dtopk_weight").to(dtype), {x, router});
        EXPECT_LE(relative_l2(gradients[0], file.read("dx")), kGradientBar);
        EXPECT_LE(relative_l2(gradients[1], file.read("drouter")), kGradientBar);
    }
}

TEST(MoeRouter, OfEqualExpertsTheLowerComesFirst) {
    const at::Tensor logits = at::tensor({1.0F, 3.0F, 3.0F, 1.0F, 3.0F, 1.0F,  //
                                          0.0F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F,  //
                                          -2.0F, 5.0F, -2.0F, -2.0F, 7.0F, -2.0F})
                                  .view({3, 6});
    const at::Tensor expected =
        at::tensor({1, 2, 4, 0, 0, 1, 2, 3, 4, 1, 0, 2}, at::kLong).view({3, 4});
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
        const Routing routing = route(logits.to(dtype), 4);
        EXPECT_TRUE(at::equal(routing.experts, expected)) << routing.experts;
        EXPECT_EQ(routing.weights.scalar_type(), dtype);
        EXPECT_TRUE(at::equal(routing.counts, at::tensor({3, 3, 3, 1, 2, 0}, at::kLong)));
        EXPECT_LE(relative_l2(routing.weights[1], at::full({4}, 0.25, dtype)), 0.0);
    }
    // Many experts and rows: the same choice as a stable sort, whatever the vector width.
    const at::Tensor few_values = random_normal({257, 512}, 3).mul(2).round().div(2);
    const auto sorted = at::sort(at::softmax(few_values.to(at::kFloat), 1), /*stable=*/true, 1,
                                 /*descending=*/true);
    const Routing routing = route(few_values.to(at::kFloat), 10);
    EXPECT_TRUE(at::equal(routing.experts, std::get<1>(sorted).narrow(1, 0, 10)));
}

TEST(MoeRouter, WeightsAreRoundedOnceFromFp32) {
    const at::Tensor logits = random_normal({65, 16}, 1, at::kBFloat16);
    const Routing routing = route(logits, 3);
    const at::Tensor chosen = at::softmax(logits.to(at::kFloat), 1).gather(1, routing.experts);
    EXPECT_TRUE(at::equal(routing.weights, (chosen / chosen.sum(1, true)).to(at::kBFloat16)));
    EXPECT_EQ(routing.counts.sum().item<std::int64_t>(), 65 * 3);
    EXPECT_NEAR(routing.probability_sums.sum().item<double>(), 65.0, 1e-4);
}

TEST(MoeRouter, GradientsByDifferences) {
    // Far enough apart that the differences change no choice.
    const at::Tensor logits = random_normal({5, 6}, 2).mul(3);
    expect_gradients_by_differences(
        [](const std::vector<at::Tensor>& t) {
            const Routing routing = route(t[0], 3);
            return at::cat({routing.weights.flatten(), routing.probability_sums});
        },
        {logits});
    for (const std::int64_t all_or_one : {1, 6}) {
        const at::Tensor value = leaf(logits);
        const Routing routing = route(value, all_or_one);
        const at::Tensor d_weights = random_normal(routing.weights.sizes(), 4);
        const at::Tensor gradient = gradients_of(routing.weights, d_weights, {value})[0];
        if (all_or_one == 1) {
            EXPECT_EQ(gradient.abs().max().item<double>(), 0.0) << "the only weight is always 1";
        } else {
            EXPECT_NEAR(gradient.sum().item<double>(), 0.0, 1e-12);
        }
    }
}

TEST(MoeRouter, NoTokensAndNotANumber) {
    const at::Tensor none = leaf(at::zeros({0, 4}));
    const Routing routing = route(none, 2);
    EXPECT_EQ(routing.experts.sizes(), at::IntArrayRef({0, 2}));
    EXPECT_EQ(routing.counts.sum().item<std::int64_t>(), 0);
    EXPECT_EQ(routing.probability_sums.sum().item<double>(), 0.0);
    const auto gradients =
        gradients_of(routing.probability_sums, at::ones({4}, at::kDouble), {none});
    EXPECT_EQ(gradients[0].sizes(), none.sizes());
    // Choices stay valid, so that the loss, not a kernel, reports the broken layer.
    at::Tensor broken = at::zeros({2, 4});
    broken[1].fill_(std::numeric_limits<float>::quiet_NaN());
    const Routing chosen = route(broken, 3);
    EXPECT_TRUE(at::equal(chosen.experts[1], at::tensor({0, 1, 2}, at::kLong)));
    EXPECT_TRUE(chosen.weights[1].isnan().all().item<bool>());
    EXPECT_THROW((void)route(broken, 0), UsageError);
    EXPECT_THROW((void)route(broken, 5), UsageError);
    EXPECT_THROW((void)route(broken[0], 1), UsageError);
}

struct Balanced {
    double loss;
    std::vector<at::Tensor> gradients;  // of each layer's logits
};

Balanced balance(const SafetensorsFile& file, at::ScalarType dtype) {
    std::vector<at::Tensor> logits;
    at::Tensor counts = at::zeros({8}, at::kLong), sums = at::zeros({8}, at::kDouble);
    std::int64_t num_rows = 0;
    for (int layer = 0; layer < 3; ++layer) {
        logits.push_back(leaf(file.read(fmt::format("logits.{}", layer)).to(dtype)));
        at::Tensor rows = logits.back();
        if (file.contains("attention_mask")) {  // padding is dropped before it is routed
            rows = rows.index_select(0, file.read("attention_mask").nonzero().squeeze(1));
        }
        const Routing routing = route(rows, 2);
        counts = counts + routing.counts;
        sums = sums + routing.probability_sums;
        num_rows += rows.size(0);
    }
    const at::Tensor coefficients = load_balancing_coefficients(counts, at::tensor({num_rows}));
    return {coefficients.dot(sums.detach()).item<double>(),
            gradients_of(sums, coefficients, logits)};
}

TEST(MoeLoadBalancing, Golden) {
    for (const char* name : {"moe/e8_k2_aux_loss", "moe/e8_k2_aux_loss_masked"}) {
        const SafetensorsFile file = open_golden(name);
        EXPECT_EQ(file.read("daux").item<float>(), 1.0F);
        for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
            const Balanced result = balance(file, dtype);
            const double aux = file.read("aux").item<double>();
            EXPECT_NEAR(result.loss, aux, kOutputBar * aux);
            for (std::size_t layer = 0; layer < 3; ++layer) {
                EXPECT_LE(relative_l2(result.gradients[layer],
                                      file.read(fmt::format("dlogits.{}", layer))),
                          kAuxGradientBar);
            }
        }
    }
}

TEST(MoeLoadBalancing, PerfectBalanceGivesTheNumberOfChoicesAndNoRowsGiveZero) {
    const at::Tensor counts = at::full({8}, 30, at::kLong);  // 80 rows, 3 of 8 experts each
    const at::Tensor sums = at::full({8}, 10.0, at::kDouble);
    const at::Tensor coefficients = load_balancing_coefficients(counts, at::tensor({80}));
    EXPECT_DOUBLE_EQ(coefficients.dot(sums).item<double>(), 3.0);
    const at::Tensor none =
        load_balancing_coefficients(at::zeros({8}, at::kLong), at::zeros({}, at::kLong));
    EXPECT_EQ(none.abs().sum().item<double>(), 0.0);
}

}  // namespace
}  // namespace hybridcp
