// Causal grouped-query softmax attention over blocks of packed documents, some queries at a time
// against all keys that they see, so that memory is one tile of scores. Softmax in fp32; backward
// recomputes the scores from q and k. Where a query's keys come in several parts:
// partial_attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace hybridcp {

/// Queries [q_begin, q_end) attend keys [kv_begin, kv_end): all of them, or causal and aligned at
/// the end: the last query sees all keys, the one before it all but the last, and so on. A
/// document's part on one rank, or all of it.
struct AttentionBlock {
    std::int64_t q_begin = 0;
    std::int64_t q_end = 0;
    std::int64_t kv_begin = 0;
    std::int64_t kv_end = 0;
    bool causal = true;
};

struct AttentionOutput {
    at::Tensor o;    // [Tq, Hq, D] in q's dtype, zero for queries in no block
    at::Tensor lse;  // [Tq, Hq] fp32 (fp64 for fp64), no gradient
};

/// All queries and some of the keys. Query head h uses KV head h / (Hq/Hkv). A query is in one
/// block at most.
struct AttentionPart {
    at::Tensor q;  // [Tq, Hq, D]
    at::Tensor k;  // [Tk, Hkv, D] of q's dtype, any strides
    at::Tensor v;  // [Tk, Hkv, D]
    std::span<const AttentionBlock> blocks;
    double scale = 1.0;
};

/// Query head h uses KV head h / (Hq/Hkv). Differentiable in q, k and v; gradients of k and v are
/// accumulated in fp32 over blocks. Shapes: q [Tq, Hq, D]; k, v [Tk, Hkv, D]. Errors: UsageError
/// for shapes or dtypes that do not fit, a block outside the tensors, a causal one with more
///         queries than keys, one with queries and no keys, or two blocks that share a query.
[[nodiscard]] AttentionOutput causal_attention(const at::Tensor& q,
                                               const at::Tensor& k,
                                               const at::Tensor& v,
                                               const std::vector<AttentionBlock>& blocks,
                                               double scale);
/// The o of causal_attention once more, from an earlier call with the same arguments: computes
/// nothing but the gradients.
[[nodiscard]] at::Tensor recall_attention(const AttentionPart& whole, const at::Tensor& o);

/// causal_attention without autograd, for callers that exchange keys: `whole` has all keys that its
/// queries see.
[[nodiscard]] AttentionOutput attend_whole(const AttentionPart& whole);
struct AttentionGradients {
    at::Tensor dq;  // [Tq, Hq, D]
    at::Tensor dk;  // [Tk, Hkv, D]
    at::Tensor dv;  // [Tk, Hkv, D]
};
/// dq in q's dtype; dk and dv, of any strides, in the dtype of sums (fp32; fp64 for fp64).
[[nodiscard]] AttentionGradients attend_whole_backward(const AttentionPart& whole,
                                                       const at::Tensor& d_o);

}  // namespace hybridcp
