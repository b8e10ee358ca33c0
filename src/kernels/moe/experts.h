// The experts of a mixture: feed-forward layers of which each token passes through a few. Dropless:
// an expert takes as many tokens as chose it.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/moe/router.h"

namespace hybridcp {

/// y_t = sum over the chosen experts e of weight_te down_e (silu(gate_e x_t) * up_e x_t).
/// Differentiable in x, routing.weights, gate_up and down; the gradients of the weights are
/// accumulated and returned in their precision (kernels/linear/linear.h). Tokens are sorted by
/// expert, each expert is one product a projection, and the sum over experts is taken in fp32 in
/// ascending order: runs are deterministic. The counts are read by the host (one synchronisation).
/// This function is all that a kernel for grouped products replaces, and what expert parallelism
/// calls on the rows that it has received for its own experts.
/// Shapes: x [T, d]; gate_up [E, 2 Fe, d], gate rows first, and down [E, d, Fe], in fp32 or x's
/// dtype; returns [T, d]. T, and the tokens of an expert, may be 0.
/// Errors: UsageError for shapes that do not fit.
[[nodiscard]] at::Tensor expert_mlp(const at::Tensor& x,
                                    const Routing& routing,
                                    const at::Tensor& gate_up,
                                    const at::Tensor& down);

}  // namespace hybridcp
