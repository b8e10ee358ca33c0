#include "kernels/loss/cross_entropy.h"

#include <gtest/gtest.h>

#include "hybridcp/error.h"
#include "kernels/comparison.h"

namespace hybridcp {
namespace {

using namespace testing;

/// The definition, row by row in fp64.
at::Tensor naive_losses(const at::Tensor& logits, const at::Tensor& targets) {
    std::vector<at::Tensor> losses;
    for (std::int64_t row = 0; row < logits.size(0); ++row) {
        const auto target = targets[row].item<std::int64_t>();
        losses.push_back(target == kIgnoredTarget ? (logits[row] * 0).sum()
                                                  : logits[row].logsumexp(0) - logits[row][target]);
    }
    return losses.empty() ? logits.sum(1) : at::stack(losses);
}

at::Tensor some_targets(std::int64_t num_rows, std::int64_t vocabulary, std::uint64_t seed) {
    at::Generator generator = at::detail::createCPUGenerator(seed);
    at::Tensor targets =
        at::randint(vocabulary, {num_rows}, generator, at::TensorOptions().dtype(at::kLong));
    for (std::int64_t row = 2; row < num_rows; row += 5) {
        targets[row] = kIgnoredTarget;
    }
    return targets;
}

TEST(CrossEntropy, GoldenLogits) {
    for (const std::string name : {"basic", "large_logits"}) {
        SCOPED_TRACE(name);
        const SafetensorsFile file = open_golden("cross_entropy/" + name);
        const at::Tensor logits = leaf(file.read("logits")), targets = file.read("targets");
        const CrossEntropy result = cross_entropy_logits(logits, targets);
        const at::Tensor loss = result.loss_sum / targets.ne(kIgnoredTarget).sum();
        EXPECT_LE(relative_l2(loss, file.read("loss")), kOutputBar);
        EXPECT_LE(relative_l2(result.loss_per_token, file.read("loss_per_token")), kOutputBar);
        const at::Tensor d_logits = gradients_of(loss, file.read("dloss"), {logits})[0];
        EXPECT_LE(relative_l2(d_logits, file.read("dlogits")), kGradientBar);
    }
}

TEST(CrossEntropy, GoldenLmHeadInChunksOfAnySize) {
    const SafetensorsFile file = open_golden("cross_entropy/lm_head");
    const at::Tensor targets = file.read("targets"), num_valid = targets.ne(kIgnoredTarget).sum();
    for (const std::int64_t rows_per_chunk : {1, 7, 39, 40, 1024}) {
        SCOPED_TRACE(rows_per_chunk);
        const at::Tensor hidden = leaf(file.read("hidden")), weight = leaf(file.read("weight"));
        const CrossEntropy result = cross_entropy_lm_head(hidden, weight, targets, rows_per_chunk);
        const at::Tensor loss = result.loss_sum / num_valid;
        EXPECT_LE(relative_l2(loss, file.read("loss")), kOutputBar);
        EXPECT_LE(relative_l2(result.loss_per_token, file.read("loss_per_token")), kOutputBar);
        EXPECT_FALSE(result.loss_per_token.requires_grad());
        const auto gradients = gradients_of(loss, file.read("dloss"), {hidden, weight});
        EXPECT_LE(relative_l2(gradients[0], file.read("dhidden")), kGradientBar);
        EXPECT_LE(relative_l2(gradients[1], file.read("dweight")), kGradientBar);
    }
}

TEST(CrossEntropy, EqualsTheDefinition) {
    for (const std::int64_t num_rows : {0, 1, 2, 3, 63, 65}) {
        for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
            SCOPED_TRACE(fmt::format("{} rows {}", num_rows, at::toString(dtype)));
            const bool is_fp32 = dtype == at::kFloat;
            const at::Tensor hidden = leaf(random_normal({num_rows, 24}, 1, dtype));
            const at::Tensor weight = leaf(random_normal({97, 24}, 2, dtype));
            const at::Tensor targets = some_targets(num_rows, 97, 3);
            const std::vector<at::Tensor> wide{leaf(hidden.to(at::kDouble)),
                                               leaf(weight.to(at::kDouble))};
            const at::Tensor losses = naive_losses(at::mm(wide[0], wide[1].t()), targets);
            const auto expected = gradients_of(losses.sum(), at::full({}, 0.3, at::kDouble), wide);
            const CrossEntropy result = cross_entropy_lm_head(hidden, weight, targets, 16);
            EXPECT_EQ(result.loss_sum.scalar_type(), at::kFloat);
            EXPECT_LE(relative_l2(result.loss_per_token, losses), is_fp32 ? kOutputBar : kBf16Bar);
            EXPECT_LE(relative_l2(result.loss_sum, losses.sum()), is_fp32 ? kOutputBar : kBf16Bar);
            const auto gradients =
                gradients_of(result.loss_sum, at::full({}, 0.3), {hidden, weight});
            for (std::size_t i = 0; i < 2; ++i) {
                EXPECT_EQ(gradients[i].scalar_type(), dtype);
                EXPECT_LE(relative_l2(gradients[i], expected[i]), is_fp32 ? kGradientBar : 1e-2)
                    << i;
            }
        }
    }
}

/// The logits of the fused form are those of the plain one: same bits, one chunk or several.
TEST(CrossEntropy, ChunksDoNotChangeTheLoss) {
    const at::Tensor hidden = random_normal({65, 24}, 1, at::kFloat),
                     weight = random_normal({97, 24}, 2, at::kFloat);
    const at::Tensor targets = some_targets(65, 97, 3);
    const at::Tensor whole =
        cross_entropy_logits(at::mm(hidden, weight.t()), targets).loss_per_token;
    EXPECT_LE(relative_l2(cross_entropy_lm_head(hidden, weight, targets, 8).loss_per_token, whole),
              3e-7);
}

TEST(CrossEntropy, GradientsByDifferences) {
    const at::Tensor targets = some_targets(7, 11, 3);
    expect_gradients_by_differences(
        [&](const auto& x) { return cross_entropy_lm_head(x[0], x[1], targets, 3).loss_sum; },
        {random_normal({7, 4}, 1), random_normal({11, 4}, 2)});
    expect_gradients_by_differences(
        [&](const auto& x) { return cross_entropy_logits(x[0], targets).loss_sum; },
        {random_normal({7, 11}, 1)});
}

TEST(CrossEntropy, AllIgnoredIsZeroInBothDirections) {
    const at::Tensor hidden = leaf(random_normal({5, 4}, 1, at::kFloat));
    const at::Tensor weight = leaf(random_normal({11, 4}, 2, at::kFloat));
    const at::Tensor targets = at::full({5}, kIgnoredTarget, at::kLong);
    const CrossEntropy result = cross_entropy_lm_head(hidden, weight, targets, 2);
    EXPECT_EQ(result.loss_sum.item<double>(), 0);
    for (const at::Tensor& gradient :
         gradients_of(result.loss_sum, at::ones({}), {hidden, weight})) {
        EXPECT_EQ(gradient.count_nonzero().item<std::int64_t>(), 0);
    }
}

TEST(CrossEntropy, OneInputMayBeFrozenAndNoGradWorks) {
    const at::Tensor hidden = random_normal({5, 4}, 1, at::kFloat),
                     weight = random_normal({11, 4}, 2, at::kFloat);
    const at::Tensor targets = some_targets(5, 11, 3);
    const at::Tensor hidden_leaf = leaf(hidden), weight_leaf = leaf(weight);
    const auto both =
        gradients_of(cross_entropy_lm_head(hidden_leaf, weight_leaf, targets).loss_sum,
                     at::ones({}), {hidden_leaf, weight_leaf});
    const auto first = gradients_of(cross_entropy_lm_head(hidden_leaf, weight, targets).loss_sum,
                                    at::ones({}), {hidden_leaf});
    const auto second = gradients_of(cross_entropy_lm_head(hidden, weight_leaf, targets).loss_sum,
                                     at::ones({}), {weight_leaf});
    EXPECT_TRUE(both[0].equal(first[0]));
    EXPECT_TRUE(both[1].equal(second[0]));
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(cross_entropy_lm_head(hidden_leaf, weight_leaf, targets).loss_sum.requires_grad());
}

TEST(CrossEntropy, ATargetOutsideTheVocabularyIsNamedWithItsRow) {
    const at::Tensor hidden = at::zeros({5, 4}), weight = at::zeros({11, 4});
    for (const std::int64_t wrong : {std::int64_t{11}, std::int64_t{-1}, std::int64_t{-101}}) {
        at::Tensor targets = at::zeros({5}, at::kLong);
        targets[3] = wrong;
        try {
            (void)cross_entropy_lm_head(hidden, weight, targets);
            FAIL() << "target " << wrong << " was taken";
        } catch (const UsageError& error) {
            const std::string message = error.what();
            EXPECT_NE(message.find(fmt::format("target {} in row 3", wrong)), std::string::npos)
                << message;
        }
    }
    EXPECT_THROW((void)cross_entropy_lm_head(hidden, at::zeros({11, 5}), at::zeros({5}, at::kLong)),
                 UsageError);
    EXPECT_THROW((void)cross_entropy_lm_head(hidden, weight, at::zeros({4}, at::kLong)),
                 UsageError);
    EXPECT_THROW((void)cross_entropy_lm_head(hidden, weight, at::zeros({5}, at::kInt)), UsageError);
}

}  // namespace
}  // namespace hybridcp
