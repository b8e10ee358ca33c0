// The rotation of rotary.h with a fused CPU kernel.
#pragma once

#include <ATen/core/Tensor.h>

namespace hybridcp {

/// Rotates by +angle or, with sign = -1, by -angle. x [T, H, D] that takes_fused (pointwise.h);
/// cos, sin [T, r/2]; returns x's shape and dtype, no gradient.
[[nodiscard]] at::Tensor fused_rotate(const at::Tensor& x,
                                      const at::Tensor& cos,
                                      const at::Tensor& sin,
                                      double sign);

}  // namespace hybridcp
