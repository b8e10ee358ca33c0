// Full attention over documents spread over ranks: by head shards (ulysses), by gathering keys and
// values, or round a ring.

#include "hybridcp/error.h"
#include "ops/context_parallel.h"
#include "ops/exchange_tape.h"
#include "ops/gathered_attention.h"
#include "ops/head_exchange.h"
#include "ops/ring_attention.h"

namespace hybridcp {

namespace {

/// Attention to keys that are all here.
at::Tensor attend_here(const AttentionPart& part, ExchangeTape* tape) {
    constexpr const char* kTapeName = "attention";
    if (tape != nullptr && tape->replays()) {
        return recall_attention(part, tape->take(kTapeName).tensors[0]);
    }
    at::Tensor o = causal_attention(part.q, part.k, part.v,
                                    {part.blocks.begin(), part.blocks.end()}, part.scale)
                       .o;
    if (tape != nullptr) {
        tape->record({.op = kTapeName, .tensors = {o}});
    }
    return o;
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
    const at::Tensor o = attend_here({.q = shard[0],
                                      .k = k_shard,
                                      .v = v_shard,
                                      .blocks = context.plan->document_blocks,
                                      .scale = scale},
                                     context.tape);
    return gather_heads({o}, {query_shards}, "attention_ulysses", context)[0];
}

}  // namespace

Sharded causal_attention_cp(
    const Sharded& q, const Sharded& k, const Sharded& v, double scale, const CpContext& context) {
    const BatchPlan& plan = *context.plan;
    check_layout("attention", {&q, &k, &v}, plan);
    if (plan.layout.num_ranks() == 1) {
        return q.with(attend_here({.q = q.local,
                                   .k = k.local,
                                   .v = v.local,
                                   .blocks = plan.document_blocks,
                                   .scale = scale},
                                  context.tape));
    }
    switch (context.parallel.full_attention_mode) {
        case FullAttentionMode::kUlysses:
            return q.with(attention_ulysses(q.local, k.local, v.local, scale, context));
        case FullAttentionMode::kAllGather:
            return q.with(gathered_attention(q.local, k.local, v.local, scale, context));
        case FullAttentionMode::kRing:
            return q.with(ring_attention(q.local, k.local, v.local, scale, context));
    }
    throw UsageError("attention: unknown mode");
}

}  // namespace hybridcp
