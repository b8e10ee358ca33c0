// The projections of a layer. What makes them more than at::linear is the gradient of the weight:
// it is summed over tokens, ranks and micro-batches, so it is accumulated and returned in fp32,
// also of a weight that is there in bf16 (autograd rounds it where the leaf's grad_dtype asks for
// that). Rounding it to bf16 first would make the result depend on how the tokens are split.
#pragma once

#include <ATen/core/Tensor.h>

namespace hybridcp {

/// y = x weight^T in x's dtype; the weight is rounded to it at use. Differentiable.
/// Shapes: x [T, in] fp32, bf16 or fp64; weight [out, in] fp32 or x's dtype; returns [T, out].
/// Errors: UsageError for shapes that do not fit.
[[nodiscard]] at::Tensor linear_projection(const at::Tensor& x, const at::Tensor& weight);

/// dy^T x, accumulated and returned in fp32 (fp64 for fp64): the gradient of a weight.
/// Shapes: dy [T, out], x [T, in], one dtype; returns [out, in].
[[nodiscard]] at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x);

}  // namespace hybridcp
