// How far a tensor is from its reference, in the measures of the golden data's tolerance table
// (docs/numerics.md). Everything is computed in fp64 on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace hybridcp::cli {

struct Difference {
    double error = 0.0;
    std::string where = {};
};

/// |x - ref| / |ref| over the whole tensor; 0 when both are zero, infinite when only the reference
/// is. Errors: UsageError when the shapes differ.
[[nodiscard]] Difference relative_l2(const at::Tensor& actual, const at::Tensor& expected);

/// The worst head's |x - ref| / |ref|, heads along `head_dim`. A head whose reference is almost
/// zero (below 1e-6 of the largest head) passes a bar if |x - ref| <= bar |ref| + 1e-6 (largest
/// head norm): its error is scaled so that it meets `bar` exactly there.
[[nodiscard]] Difference relative_l2_per_head(const at::Tensor& actual,
                                              const at::Tensor& expected,
                                              std::int64_t head_dim,
                                              double bar);

/// The largest |x - ref|.
[[nodiscard]] Difference max_abs(const at::Tensor& actual, const at::Tensor& expected);

/// The largest distance of two bf16 tensors, counted in representable bf16 values between them.
[[nodiscard]] Difference bf16_steps(const at::Tensor& actual, const at::Tensor& expected);

}  // namespace hybridcp::cli
