// The norms of rms_norm.h with fused CPU kernels, for tensors that takes_fused (pointwise.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace hybridcp {

[[nodiscard]] at::Tensor fused_norm_zero_centered(const at::Tensor& x,
                                                  const at::Tensor& weight,
                                                  double eps);

[[nodiscard]] at::Tensor fused_norm_gated(const at::Tensor& x,
                                          const at::Tensor& z,
                                          const at::Tensor& weight,
                                          double eps);

}  // namespace hybridcp
