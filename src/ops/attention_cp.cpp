// Full attention over documents spread over ranks: by head shards (ulysses), or by gathering keys
// and values.

#include <ATen/OpMathType.h>

#include <algorithm>

#include "hybridcp/error.h"
#include "ops/context_parallel.h"
#include "ops/head_exchange.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

struct Saved : torch::CustomClassHolder {
    CpContext context;
    at::ScalarType dtype = at::kFloat;  // of the local rows
};

/// [T_local, ...] of each rank -> [T, ...] in flat order. Shards are padded to the longest, so that
/// any sizes gather in one collective; backward sends each rank its rows and sums them in rank
/// order.
struct GatherTokensFunction : Function<GatherTokensFunction> {
    static Variable forward(AutogradContext* ctx, const Variable& local, const CpContext& context) {
        auto saved = c10::make_intrusive<Saved>();
        saved->context = context;
        saved->dtype = local.scalar_type();
        ctx->saved_data["saved"] = c10::IValue::make_capsule(saved);
        const BatchPlan& plan = *context.plan;
        const std::int64_t longest =
            *std::max_element(plan.tokens_per_rank.begin(), plan.tokens_per_rank.end());
        at::Tensor padded = local.contiguous();
        if (local.size(0) < longest) {
            std::vector<std::int64_t> shape = local.sizes().vec();
            shape[0] = longest - local.size(0);
            padded = at::cat({padded, at::zeros(shape, local.options())});
        }
        const at::Tensor gathered =
            context.group->all_gather("attention_kv", padded);  // [P, longest, ...]
        std::vector<at::Tensor> shards;
        for (std::size_t r = 0; r < plan.tokens_per_rank.size(); ++r) {
            shards.push_back(
                gathered[static_cast<std::int64_t>(r)].narrow(0, 0, plan.tokens_per_rank[r]));
        }
        const at::Tensor rank_major = at::cat(shards);
        return (plan.rank_major_to_flat.defined()
                    ? rank_major.index_select(0, plan.rank_major_to_flat)
                    : rank_major)
            .to(at::toOpMathType(local.scalar_type()));
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        const auto holder = ctx->saved_data["saved"].toCapsule();
        const auto& saved = static_cast<const Saved&>(*holder);
        const CpContext& context = saved.context;
        const BatchPlan& plan = *context.plan;
        const at::Tensor rank_major = plan.flat_to_rank_major.defined()
                                          ? gradients[0].index_select(0, plan.flat_to_rank_major)
                                          : gradients[0].contiguous();
        const std::vector<std::int64_t> receive_rows(plan.tokens_per_rank.size(),
                                                     plan.num_local_tokens());
        const at::Tensor received = context.group->all_to_all("attention_kv", rank_major,
                                                              plan.tokens_per_rank, receive_rows);
        std::vector<std::int64_t> shape = rank_major.sizes().vec();
        shape[0] = plan.num_local_tokens();
        shape.insert(shape.begin(), context.group->size());
        return {received.view(shape).sum(0).to(saved.dtype), Variable()};
    }
};

/// Keys and values travel in their own dtype; the attention over them and their gradients are in
/// fp32, so that parts of a gradient from several ranks are summed before they are rounded, as on
/// one rank.
at::Tensor attention_all_gather(const at::Tensor& q,
                                const at::Tensor& k,
                                const at::Tensor& v,
                                double scale,
                                const CpContext& context) {
    const std::int64_t head_dim = k.size(2);
    const at::Tensor kv = GatherTokensFunction::apply(at::cat({k, v}, 2), context);  // [T, Hkv, 2D]
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
    const auto me = static_cast<std::size_t>(context.group->rank());
    const std::vector<std::int64_t> index =
        shared_head_index(query_shards[me], kv_shards[me], group_size);
    if (!index.empty()) {
        const at::Tensor heads =
            at::tensor(index, at::TensorOptions().dtype(at::kLong)).to(k.device());
        k_shard = k_shard.index_select(1, heads);
        v_shard = v_shard.index_select(1, heads);
    }
    const at::Tensor o =
        causal_attention(shard[0], k_shard, v_shard, context.plan->document_blocks, scale).o;
    return gather_heads({o}, {query_shards}, "attention_ulysses", context)[0];
}

}  // namespace

at::Tensor causal_attention_cp(const at::Tensor& q,
                               const at::Tensor& k,
                               const at::Tensor& v,
                               double scale,
                               const CpContext& context) {
    const BatchPlan& plan = *context.plan;
    HCP_CHECK_EQ(q.size(0), plan.num_local_tokens(), "attention: local tokens of the plan");
    if (plan.layout.num_ranks() == 1) {
        return causal_attention(q, k, v, plan.document_blocks, scale).o;
    }
    return context.parallel.full_attention_mode == FullAttentionMode::kUlysses
               ? attention_ulysses(q, k, v, scale, context)
               : attention_all_gather(q, k, v, scale, context);
}

}  // namespace hybridcp
