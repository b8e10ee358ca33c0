// The two RMS norms of the Qwen3.5 family; statistics in fp32 (fp64 for fp64 inputs). They round at
// different places: the zero-centred one once at the end, the gated one before the weight, after
// it, and at the end.
#pragma once

#include <ATen/core/Tensor.h>

namespace hybridcp {

/// y = x rsqrt(mean(x^2) + eps) (1 + weight) over the last dim, one rounding at the end.
/// Differentiable. Shapes: x [..., D]; weight [D]; returns x's shape and dtype.
[[nodiscard]] at::Tensor rms_norm_zero_centered(const at::Tensor& x,
                                                const at::Tensor& weight,
                                                double eps);

/// y = weight (x rsqrt(mean(x^2) + eps)) silu(z) over the last dim. Differentiable.
/// Shapes: x, z [..., D]; weight [D]; returns x's shape and dtype.
[[nodiscard]] at::Tensor rms_norm_gated(const at::Tensor& x,
                                        const at::Tensor& z,
                                        const at::Tensor& weight,
                                        double eps);

}  // namespace hybridcp
