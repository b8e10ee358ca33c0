// The gates of a Gated DeltaNet layer from their projections. Differentiable.
#pragma once

#include <ATen/core/Tensor.h>

namespace hybridcp {

/// g = -exp(A_log) * softplus(a + dt_bias), softplus the identity above 20.
/// Shapes: a [..., Hv] any dtype, A_log and dt_bias [Hv]; returns fp32 (fp64 for fp64 inputs) [...,
/// Hv].
[[nodiscard]] at::Tensor gdn_log_decay(const at::Tensor& a,
                                       const at::Tensor& A_log,
                                       const at::Tensor& dt_bias);

/// beta = sigmoid(b), in b's dtype.
[[nodiscard]] at::Tensor gdn_beta(const at::Tensor& b);

}  // namespace hybridcp
