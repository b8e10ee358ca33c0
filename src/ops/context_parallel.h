// The operations of a hybrid transformer whose result depends on other ranks' tokens: autograd
// functions made of a local kernel and an exchange. Each is differentiable through and through,
// forward and backward exchange in the same group, and works for any segment sizes (uneven, one
// token, empty). With one rank nothing is exchanged. docs/modes.md draws who sends what to whom.
// Legend: T local tokens, Hqk/Hv GDN key and value heads, Hq/Hkv attention heads, K/V/D head dims,
// C channels.
#pragma once

#include <ATen/core/Tensor.h>

#include "hybridcp/group.h"
#include "hybridcp/parallel.h"
#include "kernels/gdn/gdn.h"
#include "ops/batch_plan.h"

namespace hybridcp {

/// What an op needs besides its tensors. Group and plan must outlive the backward pass.
struct CpContext {
    Group* group = nullptr;  // the cp group; may be null when the layout has one rank
    const BatchPlan* plan = nullptr;
    Parallel parallel;
};

/// causal_conv_silu whose halo comes from the ranks that hold the preceding tokens.
/// Shapes: x [T, C]; weight [C, W]; returns [T, C].
/// Comm: forward, one message of (W-1) rows of x to each rank that needs them; backward the
/// reverse.
[[nodiscard]] at::Tensor causal_conv_silu_cp(const at::Tensor& x,
                                             const at::Tensor& weight,
                                             const CpContext& context);

/// The gated delta rule over documents spread over ranks, by
/// context.parallel.linear_attention_mode. Shapes: q, k [T, Hqk, K]; v [T, Hv, V]; g, beta [T, Hv];
/// returns o [T, Hv, V]. Comm: p2p: one fp32 state Hv*K*V to each successor, its gradient back;
/// all_gather: (S, M) of each segment, dS back;
///       ulysses: q, k, v, g, beta to head shards, o back, and the same in reverse.
[[nodiscard]] at::Tensor gated_delta_rule_cp(const GdnInputs& inputs,
                                             const GdnOptions& options,
                                             const CpContext& context);

/// Causal softmax attention over documents spread over ranks, by
/// context.parallel.full_attention_mode. Shapes: q [T, Hq, D]; k, v [T, Hkv, D] (already rotated);
/// returns o [T, Hq, D]. Comm: ulysses: q, k, v to head shards, o back; all_gather: k and v of all
/// ranks; backward the reverse.
[[nodiscard]] at::Tensor causal_attention_cp(const at::Tensor& q,
                                             const at::Tensor& k,
                                             const at::Tensor& v,
                                             double scale,
                                             const CpContext& context);

}  // namespace hybridcp
