// Cross-entropy of rows of logits with fused CPU kernels, for logits that takes_fused
// (pointwise.h). Targets are int64 [N] and checked; a negative one is ignored.
#pragma once

#include <ATen/core/Tensor.h>

namespace hybridcp {

struct RowLosses {
    at::Tensor loss;        // [N] fp32
    at::Tensor statistics;  // [N, 2] fp32: all that a gradient needs besides the logits
};

/// logits [N, vocabulary].
[[nodiscard]] RowLosses fused_row_losses(const at::Tensor& logits, const at::Tensor& targets);

/// The gradient of scale * (sum of losses), in the dtype of the logits. scale: [], on the CPU.
[[nodiscard]] at::Tensor fused_row_gradients(const at::Tensor& logits,
                                             const at::Tensor& targets,
                                             const at::Tensor& statistics,
                                             const at::Tensor& scale);

/// The losses; `logits`, contiguous, becomes the gradient of their sum.
[[nodiscard]] at::Tensor fused_losses_to_gradients(at::Tensor& logits, const at::Tensor& targets);

}  // namespace hybridcp
