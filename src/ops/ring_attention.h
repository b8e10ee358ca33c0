// Full attention whose keys and values go round the ranks; layout/ring.h says which rows and
// blocks.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/context_parallel.h"

namespace hybridcp {

/// Causal softmax attention over documents spread over ranks, for any layout and head counts.
/// Differentiable; the same bits every time. Kept for backward: q, k, v, o (in
/// bf16 with what its rounding took away) and its log-sum-exp.
/// Shapes: q [T, Hq, D]; k, v [T, Hkv, D]; returns o [T, Hq, D].
/// Comm: forward, P - 1 messages to rank - 1 with k and v of the rows that a rank ahead needs, in
///       their dtype, while this rank computes; backward the same again, and in each step the fp32
///       gradients of the rows used, straight to their rank.
[[nodiscard]] at::Tensor ring_attention(const at::Tensor& q,
                                        const at::Tensor& k,
                                        const at::Tensor& v,
                                        double scale,
                                        const CpContext& context);

}  // namespace hybridcp
