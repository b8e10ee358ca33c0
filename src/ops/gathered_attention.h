// Full attention by gathered keys and values.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/context_parallel.h"

namespace hybridcp {

/// Causal softmax attention of the local queries to the keys of all ranks, for any layout and head
/// counts. Kept for backward: the local q, k and v; the gathered ones are not, and backward gathers
/// them again.
/// Shapes: q [T_local, Hq, D]; k, v [T_local, Hkv, D]; returns o [T_local, Hq, D].
/// Comm: op `attention_kv`: forward one all-gather of k and v in their dtype; backward the same,
///       and one all-to-all of their fp32 gradients.
[[nodiscard]] at::Tensor gathered_attention(const at::Tensor& q,
                                            const at::Tensor& k,
                                            const at::Tensor& v,
                                            double scale,
                                            const CpContext& context);

}  // namespace hybridcp
