// What the kernel tests share: golden files, distances, and gradients by central differences.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <vector>

#include "model/safetensors.h"

namespace hybridcp::testing {

// golden/README.md section 8
inline constexpr double kOutputBar = 2e-6;
inline constexpr double kGradientBar = 5e-6;
inline constexpr double kBf16Bar = 5e-3;

/// tests/golden/ops/`name`.safetensors, for name = "operator/case".
inline SafetensorsFile open_golden(const std::string& name) {
    return SafetensorsFile(std::string(HCP_GOLDEN_DIR) + "/ops/" + name + ".safetensors");
}

/// |x - reference| / |reference| over the whole tensor, in fp64; |x| where the reference is zero.
inline double relative_l2(const at::Tensor& x, const at::Tensor& reference) {
    EXPECT_EQ(x.sizes(), reference.sizes());
    const at::Tensor difference = x.detach().to(at::kDouble) - reference.detach().to(at::kDouble);
    const double norm = reference.detach().to(at::kDouble).norm().item<double>();
    return difference.norm().item<double>() / (norm > 0 ? norm : 1);
}

inline at::Tensor leaf(const at::Tensor& x) {
    return x.detach().clone().requires_grad_(true);
}

/// Gradients of <output, d_output> with respect to `inputs`.
inline std::vector<at::Tensor> gradients_of(const at::Tensor& output,
                                            const at::Tensor& d_output,
                                            const std::vector<at::Tensor>& inputs) {
    return torch::autograd::grad({output}, inputs, {d_output});
}

inline at::Tensor random_normal(at::IntArrayRef shape,
                                std::uint64_t seed,
                                at::ScalarType dtype = at::kDouble) {
    at::Generator generator = at::detail::createCPUGenerator(seed);
    return at::randn(shape, generator, at::TensorOptions().dtype(at::kDouble)).to(dtype);
}

/// The largest distance of two bf16 tensors in units of the last place.
inline std::int64_t largest_bf16_steps(const at::Tensor& x, const at::Tensor& reference) {
    const auto order = [](const at::Tensor& values) {  // monotone integers of bf16 bit patterns
        const at::Tensor bits = values.contiguous().view(at::kShort).to(at::kLong);
        return at::where(bits.lt(0), -(bits.bitwise_and(0x7fff)), bits);
    };
    return (order(x) - order(reference)).abs().max().item<std::int64_t>();
}

/// Compares autograd's gradients with central differences of <f(inputs), d_output> in fp64, each
/// input along two random directions.
inline void expect_gradients_by_differences(
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& f,
    const std::vector<at::Tensor>& inputs) {
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& input : inputs) {
        leaves.push_back(leaf(input));
    }
    const at::Tensor output = f(leaves);
    const at::Tensor d_output = random_normal(output.sizes(), 99);
    const std::vector<at::Tensor> gradients = gradients_of(output, d_output, leaves);
    const at::NoGradGuard no_grad;
    const double step = 1e-5;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        for (std::uint64_t direction_seed : {7U, 8U}) {
            const at::Tensor direction = random_normal(inputs[i].sizes(), direction_seed);
            const auto value_at = [&](double distance) {
                std::vector<at::Tensor> moved = inputs;
                moved[i] = inputs[i] + direction * distance;
                return (f(moved) * d_output).sum().item<double>();
            };
            const double numeric = (value_at(step) - value_at(-step)) / (2 * step);
            const double analytic = (gradients[i] * direction).sum().item<double>();
            const double size =
                gradients[i].norm().item<double>() * direction.norm().item<double>();
            EXPECT_NEAR(analytic, numeric, 1e-7 * size + 1e-9) << "input " << i;
        }
    }
}

}  // namespace hybridcp::testing
