#include "kernels/norm/rms_norm.h"

#include <gtest/gtest.h>

#include "hybridcp/error.h"
#include "kernels/comparison.h"

namespace hybridcp {
namespace {

using namespace testing;

constexpr double kEps = 1e-6;

/// Compares op(inputs) with a formula in fp64, outputs and gradients.
void expect_equals(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& op,
                   const std::function<at::Tensor(const std::vector<at::Tensor>&)>& formula,
                   const std::vector<at::Tensor>& values,
                   at::ScalarType dtype) {
    std::vector<at::Tensor> inputs, wide;
    for (const at::Tensor& value : values) {
        inputs.push_back(leaf(value.to(dtype)));
        wide.push_back(leaf(value.to(dtype).to(at::kDouble)));
    }
    const at::Tensor y = op(inputs), reference = formula(wide);
    const at::Tensor dy = random_normal(y.sizes(), 11, dtype);
    EXPECT_EQ(y.scalar_type(), dtype);
    EXPECT_LE(relative_l2(y, reference), dtype == at::kFloat ? kOutputBar : kBf16Bar);
    const auto gradients = gradients_of(y, dy, inputs);
    const auto expected = gradients_of(reference, dy.to(at::kDouble), wide);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        EXPECT_EQ(gradients[i].scalar_type(), dtype);
        EXPECT_LE(relative_l2(gradients[i], expected[i]),
                  dtype == at::kFloat ? kGradientBar : kBf16Bar)
            << "input " << i;
    }
}

at::Tensor zero_centered_formula(const std::vector<at::Tensor>& x) {
    return x[0] / (x[0].pow(2).mean(-1, true) + kEps).sqrt() * (x[1] + 1);
}

at::Tensor gated_formula(const std::vector<at::Tensor>& x) {
    return x[2] * (x[0] / (x[0].pow(2).mean(-1, true) + kEps).sqrt()) * x[1] * x[1].sigmoid();
}

TEST(Norm, EqualsTheDefinition) {
    const std::vector<std::vector<std::int64_t>> shapes{{0, 8},   {1, 8},     {2, 3},
                                                        {63, 65}, {3, 5, 64}, {7}};
    for (const auto& shape : shapes) {
        for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
            SCOPED_TRACE(fmt::format("{}-dim, last {}", shape.size(), shape.back()));
            const at::Tensor x = random_normal(shape, 1), z = random_normal(shape, 2);
            const at::Tensor weight = random_normal({shape.back()}, 3);
            expect_equals([](const auto& t) { return rms_norm_zero_centered(t[0], t[1], kEps); },
                          zero_centered_formula, {x, weight}, dtype);
            expect_equals([](const auto& t) { return rms_norm_gated(t[0], t[1], t[2], kEps); },
                          gated_formula, {x, z, weight}, dtype);
        }
    }
}

TEST(Norm, GoldenZeroCentered) {
    for (const std::string name : {"d64", "d80"}) {
        SCOPED_TRACE(name);
        const SafetensorsFile file = open_golden("rmsnorm_zero_centered/" + name);
        const at::Tensor x = leaf(file.read("x")), weight = leaf(file.read("weight"));
        const at::Tensor y = rms_norm_zero_centered(x, weight, kEps);
        EXPECT_LE(relative_l2(y, file.read("y")), kOutputBar);
        const auto gradients = gradients_of(y, file.read("dy"), {x, weight});
        EXPECT_LE(relative_l2(gradients[0], file.read("dx")), kGradientBar);
        EXPECT_LE(relative_l2(gradients[1], file.read("dweight")), kGradientBar);
        const at::Tensor x_bf16 = leaf(x.to(at::kBFloat16)),
                         weight_bf16 = leaf(weight.to(at::kBFloat16));
        const at::Tensor y_bf16 = rms_norm_zero_centered(x_bf16, weight_bf16, kEps);
        EXPECT_LE(largest_bf16_steps(y_bf16, file.read("y_bf16")), 1);
        const auto bf16 =
            gradients_of(y_bf16, file.read("dy").to(at::kBFloat16), {x_bf16, weight_bf16});
        EXPECT_LE(relative_l2(bf16[0], file.read("dx")), kBf16Bar);
        EXPECT_LE(relative_l2(bf16[1], file.read("dweight")), kBf16Bar);
    }
}

TEST(Norm, GoldenGated) {
    for (const std::string name : {"d32", "d128"}) {
        SCOPED_TRACE(name);
        const SafetensorsFile file = open_golden("gated_rmsnorm/" + name);
        const std::vector<std::string> names{"x", "z", "weight"};
        std::vector<at::Tensor> inputs, bf16_inputs;
        for (const std::string& input : names) {
            inputs.push_back(leaf(file.read(input)));
            bf16_inputs.push_back(leaf(file.read(input).to(at::kBFloat16)));
        }
        const at::Tensor y = rms_norm_gated(inputs[0], inputs[1], inputs[2], kEps);
        EXPECT_LE(relative_l2(y, file.read("y")), kOutputBar);
        const at::Tensor y_bf16 =
            rms_norm_gated(bf16_inputs[0], bf16_inputs[1], bf16_inputs[2], kEps);
        EXPECT_LE(largest_bf16_steps(y_bf16, file.read("y_bf16")), 1);
        const auto gradients = gradients_of(y, file.read("dy"), inputs);
        const auto bf16 = gradients_of(y_bf16, file.read("dy").to(at::kBFloat16), bf16_inputs);
        // The tiny rows, where only eps counts, come first and outweigh all others in dx.
        const std::int64_t others = y.size(1) - 2;
        EXPECT_LE(
            relative_l2(gradients[0].narrow(1, 2, others), file.read("dx").narrow(1, 2, others)),
            kGradientBar);
        for (std::size_t i = 0; i < names.size(); ++i) {
            EXPECT_LE(relative_l2(gradients[i], file.read("d" + names[i])), kGradientBar)
                << names[i];
            EXPECT_LE(relative_l2(bf16[i], file.read("d" + names[i])), kBf16Bar) << names[i];
        }
    }
}

TEST(Norm, GradientsByDifferences) {
    const at::Tensor x = random_normal({3, 5}, 1), z = random_normal({3, 5}, 2),
                     weight = random_normal({5}, 3);
    expect_gradients_by_differences(
        [](const auto& t) { return rms_norm_zero_centered(t[0], t[1], kEps); }, {x, weight});
    expect_gradients_by_differences(
        [](const auto& t) { return rms_norm_gated(t[0], t[1], t[2], kEps); }, {x, z, weight});
}

TEST(Norm, ZeroRowsAreFinite) {
    const at::Tensor x = leaf(at::zeros({2, 8})), weight = leaf(at::ones({8}));
    const at::Tensor y = rms_norm_zero_centered(x, weight, kEps);
    EXPECT_EQ(y.count_nonzero().item<std::int64_t>(), 0);
    const auto gradients = gradients_of(y, at::ones_like(y), {x, weight});
    EXPECT_NEAR(gradients[0][0][0].item<double>(), 2e3, 1);  // (1 + weight) / sqrt(eps)
}

TEST(Norm, RefusesWhatDoesNotFit) {
    EXPECT_THROW((void)rms_norm_zero_centered(at::zeros({2, 8}), at::zeros({4}), kEps), UsageError);
    EXPECT_THROW((void)rms_norm_gated(at::zeros({2, 8}), at::zeros({3, 8}), at::zeros({8}), kEps),
                 UsageError);
    EXPECT_THROW((void)rms_norm_zero_centered(at::zeros({2, 8}, at::kLong), at::zeros({8}), kEps),
                 UsageError);
}

}  // namespace
}  // namespace hybridcp
