// Converting the stream between the layouts of neighbouring layers: rows move, nothing is computed,
// so that there and back is bitwise the identity, and its gradient too.
#pragma once

#include "ops/context_parallel.h"

namespace hybridcp {

/// x in the layout `to`, which is the plan's or that of its linear-attention layers; x itself where
/// it is there already. Differentiable: the gradient takes the way back.
/// Shapes: x [T_local, ...] in either layout.
/// Comm: op `conversion`: one all-to-all of the rows that change their rank, or one message to and
/// from the one partner where each rank has no more than one (zigzag to folded: T_local/2 rows).
/// Errors: UsageError for a layout that is neither of the two.
[[nodiscard]] Sharded convert(const Sharded& x, const LayoutTag& to, const CpContext& context);

/// The context of the linear-attention layers: theirs where they run in a layout of their own, else
/// `context` itself.
[[nodiscard]] CpContext linear_attention_context(const CpContext& context);

}  // namespace hybridcp
