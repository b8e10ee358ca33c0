// Full attention over documents spread over ranks: by head shards (ulysses), by gathering keys and
// values, or round a ring.

#include <ATen/OpMathType.h>

#include "hybridcp/error.h"
#include "ops/context_parallel.h"
#include "ops/head_exchange.h"
#include "ops/ring_attention.h"
#include "ops/token_gather.h"

namespace hybridcp {

namespace {

/// Keys and values travel in their own dtype; the attention over them and their gradients are in
/// fp32, so that parts of a gradient from several ranks are summed before they are rounded, as on
/// one rank.
at::Tensor attention_all_gather(const at::Tensor& q,
                                const at::Tensor& k,
                                const at::Tensor& v,
                                double scale,
                                const CpContext& context) {
    const std::int64_t head_dim = k.size(2);
    const at::Tensor kv =
        gather_tokens({at::cat({k, v}, 2), context.plan->tag},
                      {.op = "attention_kv", .dtype = at::toOpMathType(k.scalar_type())},
                      context);  // [T, Hkv, 2D]
    return causal_attention(q.to(kv.scalar_type()), kv.narrow(2, 0, head_dim),
                            kv.narrow(2, head_dim, v.size(2)), context.plan->local_blocks, scale)
        .o.to(q.scalar_type());
}

at::Tensor attention_ulysses(const at::Tensor& q,
                             const at::Tensor& k,
                             const at::Tensor& v,
                             double scale,
                             const CpContext& context) {
    const std::int64_t group_size = q.size(1) / k.size(1);
    const HeadShards query_shards = split_heads(q.size(1), context.group->size());
    const HeadShards kv_shards = shared_heads(query_shards, group_size);
    const std::vector<at::Tensor> shard = scatter_heads(
        {q, k, v}, {query_shards, kv_shards, kv_shards}, "attention_ulysses", context);
    at::Tensor k_shard = shard[1];
    at::Tensor v_shard = shard[2];
    const at::Tensor heads =
        shared_head_index(query_shards, kv_shards, context.group->rank(), {group_size, k.device()});
    if (heads.defined()) {
        k_shard = k_shard.index_select(1, heads);
        v_shard = v_shard.index_select(1, heads);
    }
    const at::Tensor o =
        causal_attention(shard[0], k_shard, v_shard, context.plan->document_blocks, scale).o;
    return gather_heads({o}, {query_shards}, "attention_ulysses", context)[0];
}

}  // namespace

Sharded causal_attention_cp(
    const Sharded& q, const Sharded& k, const Sharded& v, double scale, const CpContext& context) {
    const BatchPlan& plan = *context.plan;
    check_layout("attention", {&q, &k, &v}, plan);
    if (plan.layout.num_ranks() == 1) {
        return q.with(causal_attention(q.local, k.local, v.local, plan.document_blocks, scale).o);
    }
    switch (context.parallel.full_attention_mode) {
        case FullAttentionMode::kUlysses:
            return q.with(attention_ulysses(q.local, k.local, v.local, scale, context));
        case FullAttentionMode::kAllGather:
            return q.with(attention_all_gather(q.local, k.local, v.local, scale, context));
        case FullAttentionMode::kRing:
            return q.with(ring_attention(q.local, k.local, v.local, scale, context));
    }
    throw UsageError("attention: unknown mode");
}

}  // namespace hybridcp
