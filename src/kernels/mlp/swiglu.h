// The dense feed-forward of a decoder layer.
#pragma once

#include <ATen/core/Tensor.h>

namespace hybridcp {

/// y = (silu(x gate^T) * (x up^T)) down^T. Differentiable.
/// Shapes: x [T, d]; gate, up [F, d]; down [d, F], in fp32 or x's dtype (kernels/linear/linear.h);
/// returns [T, d].
[[nodiscard]] at::Tensor swiglu(const at::Tensor& x,
                                const at::Tensor& gate,
                                const at::Tensor& up,
                                const at::Tensor& down);

}  // namespace hybridcp
