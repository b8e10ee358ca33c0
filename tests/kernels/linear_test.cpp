// A projection whose weight gradient is not rounded to the activations' dtype.

#include <gtest/gtest.h>

#include "hybridcp/error.h"
#include "kernels/linear/linear.h"

namespace hybridcp {
namespace {

double relative_error(const at::Tensor& a, const at::Tensor& b) {
    return ((a.to(at::kDouble) - b).norm() / b.norm()).item<double>();
}

struct Pass {
    at::Tensor y, dx, d_weight;
};

Pass run(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& dy) {
    const at::Tensor x_leaf = x.detach().clone().requires_grad_(true);
    const at::Tensor weight_leaf = weight.detach().clone().requires_grad_(true);
    const at::Tensor y = linear_projection(x_leaf, weight_leaf);
    y.backward(dy);
    return {y.detach(), x_leaf.grad(), weight_leaf.grad()};
}

class Sizes : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(Sizes, Fp32WithinRoundingOfFp64) {
    at::manual_seed(1);
    const std::int64_t T = GetParam();
    const at::Tensor x = at::randn({T, 24}), weight = at::randn({40, 24}), dy = at::randn({T, 40});
    const Pass pass = run(x, weight, dy);
    ASSERT_EQ(pass.d_weight.sizes(), weight.sizes());
    if (T == 0) {
        EXPECT_EQ(pass.d_weight.abs().max().item<float>(), 0.0F);
        return;
    }
    EXPECT_LE(relative_error(pass.y, at::mm(x.to(at::kDouble), weight.to(at::kDouble).t())), 2e-6);
    EXPECT_LE(relative_error(pass.dx, at::mm(dy.to(at::kDouble), weight.to(at::kDouble))), 5e-6);
    EXPECT_LE(relative_error(pass.d_weight, at::mm(dy.to(at::kDouble).t(), x.to(at::kDouble))),
              5e-6);
}

INSTANTIATE_TEST_SUITE_P(Tokens, Sizes, ::testing::Values(0, 1, 63, 65, 300));

TEST(Bf16, TheWeightGradientKeepsFp32AndDoesNotDependOnTheSplit) {
    at::manual_seed(2);
    const at::Tensor x = at::randn({300, 24}).to(at::kBFloat16);
    const at::Tensor weight = at::randn({40, 24});
    const at::Tensor dy = at::randn({300, 40}).to(at::kBFloat16);
    const Pass whole = run(x, weight, dy);
    EXPECT_EQ(whole.y.scalar_type(), at::kBFloat16);
    EXPECT_EQ(whole.d_weight.scalar_type(), at::kFloat);
    const at::Tensor exact = at::mm(dy.to(at::kDouble).t(), x.to(at::kDouble));
    EXPECT_LE(relative_error(whole.d_weight, exact), 1e-6);  // 2e-3 if it were rounded to bf16
    const Pass front = run(x.narrow(0, 0, 77), weight, dy.narrow(0, 0, 77));
    const Pass back = run(x.narrow(0, 77, 223), weight, dy.narrow(0, 77, 223));
    EXPECT_LE(relative_error(front.d_weight + back.d_weight, whole.d_weight.to(at::kDouble)), 1e-6);
    EXPECT_TRUE(at::equal(whole.y, at::mm(x, weight.to(at::kBFloat16).t())));
}

TEST(Refusals, ShapesThatDoNotFit) {
    EXPECT_THROW((void)linear_projection(at::zeros({3, 4}), at::zeros({5, 6})), UsageError);
}

}  // namespace
}  // namespace hybridcp
