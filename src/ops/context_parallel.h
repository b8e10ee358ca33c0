// The operations of a hybrid transformer whose result depends on other ranks' tokens: autograd
// functions made of a local kernel and an exchange. Each is differentiable through and through,
// forward and backward exchange in the same group, and works for any segment sizes (uneven, one
// token, empty) in any layout; a tensor in another layout than the plan's is refused. With one rank
// nothing is exchanged. docs/modes.md draws who sends what to whom. Legend: T local tokens, Hqk/Hv
// GDN key and value heads, Hq/Hkv attention heads, K/V/D head dims, C channels, W conv width, N
// documents.
#pragma once

#include <ATen/core/Tensor.h>

#include "hybridcp/group.h"
#include "hybridcp/parallel.h"
#include "kernels/gdn/gdn.h"
#include "ops/batch_plan.h"
#include "ops/sharded.h"

namespace hybridcp {

class ExchangeTape;  // ops/exchange_tape.h

/// What an op needs besides its tensors. Group and plan must outlive the backward pass.
struct CpContext {
    Group* group = nullptr;  // the cp group; may be null when the layout has one rank
    const BatchPlan* plan = nullptr;
    Parallel parallel;
    /// Of the checkpointed segment whose forward pass runs; backward does not look at it.
    ExchangeTape* tape = nullptr;
};

/// causal_conv_silu whose halo comes from the ranks that hold the preceding tokens.
/// Shapes: x [T, C]; weight [C, W]; initial: the rows before each document [N, W-1, C], or
/// undefined for zeros; it is read on the rank that holds the document's first token, and has its
/// gradient there. Returns [T, C].
/// Comm: forward, one message of (W-1) rows of x to each rank that needs them; backward the
/// reverse.
[[nodiscard]] Sharded causal_conv_silu_cp(const Sharded& x,
                                          const at::Tensor& weight,
                                          const CpContext& context,
                                          const at::Tensor& initial = {});

/// The last W-1 rows of each document [N, W-1, C], for the next call's `initial`: this rank's, rows
/// of other ranks are zero, so that the sum over ranks is the whole. `initial` is what stands
/// before documents that are shorter than W-1.
[[nodiscard]] at::Tensor conv_final_rows(const Sharded& x,
                                         const CpContext& context,
                                         const at::Tensor& initial = {});

/// q, k [T, Hqk, K]; v [T, Hv, V]; g, beta [T, Hv].
struct GdnShards {
    Sharded q, k, v, g, beta;
};

struct GdnResult {
    Sharded o;          // [T, Hv, V]
    at::Tensor states;  // [N, Hv, K, V] of each document after its last token, when asked for: this
                        // rank's part, zero elsewhere, so that the sum over ranks is the whole
};

/// Documents that go on from an earlier call, or into a later one (truncated back-propagation
/// through time). `initial` [N, Hv, K, V]: the state before each document's first token, the same
/// on every rank, undefined for zeros; each rank has the gradient of its part.
struct DocumentStates {
    at::Tensor initial;
    bool want_final = false;
};

/// The gated delta rule over documents spread over ranks, by
/// context.parallel.linear_attention_mode. Comm: p2p: one fp32 state Hv*K*V to each successor, its
/// gradient back; all_gather: (S, M) of each segment, dS back; scan: (S, M) in log2 rounds, (dS, M)
/// back; ulysses: q, k, v, g, beta to head shards, o back, and the same in reverse. Errors:
/// UsageError for gather_hidden on more than one rank: it has no op, the model gathers its input.
[[nodiscard]] GdnResult gated_delta_rule_cp(const GdnShards& inputs,
                                            const GdnOptions& options,
                                            const CpContext& context,
                                            const DocumentStates& documents = {});

/// Causal softmax attention over documents spread over ranks, by
/// context.parallel.full_attention_mode. Shapes: q [T, Hq, D]; k, v [T, Hkv, D] (already rotated);
/// returns o [T, Hq, D]. Comm: ulysses: q, k, v to head shards, o back; all_gather: k and v of all
/// ranks; ring: k and v from rank to rank, as far as they are needed; backward the reverse.
[[nodiscard]] Sharded causal_attention_cp(
    const Sharded& q, const Sharded& k, const Sharded& v, double scale, const CpContext& context);

}  // namespace hybridcp
