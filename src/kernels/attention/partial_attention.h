// Attention whose keys come in parts, as they do round a ring of ranks: each part is attended when
// it is there and merged into what the parts before gave, by log-sum-exp, in fp32. No autograd: the
// caller runs the parts again in its backward pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "kernels/attention/attention.h"

namespace hybridcp {

/// What no keys at all give: o zero and lse -inf, both in the dtype of sums (fp32; fp64 for fp64).
[[nodiscard]] AttentionOutput attention_to_no_keys(const at::Tensor& q);

/// Attends the keys of `part` and merges the result into `sum`: after all parts, o and lse are
/// those of attention to all keys. Queries in no block keep what they have; the first part that a
/// query meets is taken over as it is. Errors: UsageError as causal_attention.
void attend(const AttentionPart& part, AttentionOutput& sum);

/// What the backward pass of every part reads, for the output of all parts.
struct AttentionRows {
    at::Tensor d_o;    // [Tq, Hq, D]
    at::Tensor lse;    // [Tq, Hq]
    at::Tensor delta;  // [Tq, Hq], <d_o, o>
};
[[nodiscard]] AttentionRows make_attention_rows(const AttentionOutput& output,
                                                const at::Tensor& d_o);

/// Adds the gradients of one part, whose weights are exp(score - lse): dq over all parts is the
/// whole; dk and dv are those of the part's keys. `sums` are in the dtype of sums, any strides.
/// Errors: UsageError as causal_attention.
void attend_backward(const AttentionPart& part,
                     const AttentionRows& rows,
                     const AttentionGradients& sums);

}  // namespace hybridcp
