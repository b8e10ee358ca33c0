// The feed-forward of a decoder layer with a mixture of experts: router, routed experts, shared
// expert. See docs/moe.md.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/moe/router.h"

namespace hybridcp {

/// fp32 or of x's dtype. E experts of width Fe, one shared expert of width Fs.
struct MoeWeights {
    at::Tensor router;              // [E, d]
    at::Tensor gate_up;             // [E, 2 Fe, d], gate rows first
    at::Tensor down;                // [E, d, Fe]
    at::Tensor shared_gate;         // [Fs, d]
    at::Tensor shared_up;           // [Fs, d]
    at::Tensor shared_down;         // [d, Fs]
    at::Tensor shared_expert_gate;  // [1, d]
};

struct MoeOutput {
    at::Tensor y;              // [T, d]
    at::Tensor router_logits;  // [T, E] in x's dtype
    Routing routing;
};

/// y = (sum over the chosen experts of weight_e expert_e(x)) + sigmoid(x shared_expert_gate^T)
/// shared(x). Differentiable in x and all weights, and by way of routing.probability_sums.
/// Shapes: x [T, d]. Errors: UsageError for shapes that do not fit.
[[nodiscard]] MoeOutput moe_block(const at::Tensor& x,
                                  const MoeWeights& weights,
                                  std::int64_t num_experts_per_token);

}  // namespace hybridcp
