// The operators with fused pointwise kernels, each with its formula in plain tensor algebra.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

namespace hybridcp::testing {

using Tensors = std::vector<at::Tensor>;
using Op = std::function<at::Tensor(const Tensors&)>;

inline constexpr double kEps = 1e-6;

struct Case {
    std::string name;
    Tensors values;  // fp64; those with rows are [rows, width]
    Op op;
    Op formula;
};

/// SwiGLU's activation with autograd, as an operator uses it.
[[nodiscard]] at::Tensor activate(const at::Tensor& gate, const at::Tensor& up);

[[nodiscard]] Case activation_case(std::int64_t rows, std::int64_t width);

/// Packed, with empty segments and halos.
[[nodiscard]] Case conv_case(std::int64_t rows, std::int64_t width, std::int64_t num_taps);

/// One of each operator, two of the convolution.
[[nodiscard]] std::vector<Case> pointwise_cases(std::int64_t rows, std::int64_t width);

}  // namespace hybridcp::testing
