// SwiGLU's activation between its matrix products: for operators with a backward pass of their own,
// no autograd. Fused where pointwise.h says so, else ATen; in bf16 silu(gate) and the products are
// rounded either way.
#pragma once

#include <ATen/core/Tensor.h>

namespace hybridcp {

/// silu(gate) * up. gate, up [N, F], rows at any stride; returns [N, F].
[[nodiscard]] at::Tensor swiglu_activation(const at::Tensor& gate, const at::Tensor& up);

struct SwigluGradients {
    at::Tensor activated;  // [N, F] silu(gate) * up, undefined unless asked for
    at::Tensor d_gate;     // [N, F]
    at::Tensor d_up;       // [N, F]
};

/// `d_activated` [N, F] may be overwritten: d_up takes its memory.
[[nodiscard]] SwigluGradients swiglu_activation_backward(at::Tensor d_activated,
                                                         const at::Tensor& gate,
                                                         const at::Tensor& up,
                                                         bool with_activated);

}  // namespace hybridcp
