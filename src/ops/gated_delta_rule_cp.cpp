// The gated delta rule over ranks. One autograd function serves one rank, p2p and all_gather (they
// differ in the exchange of boundary states); ulysses wraps it in two head exchanges and runs it on
// whole documents.

#include "hybridcp/error.h"
#include "ops/context_parallel.h"
#include "ops/head_exchange.h"
#include "ops/state_exchange.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// What one call keeps for its backward: the kernel call and the exchange (null where nothing is
/// exchanged).
struct LocalCall : torch::CustomClassHolder {
    GdnBackend backend = GdnBackend::kEager;
    GdnOptions options;
    std::vector<std::int64_t> segment_offsets;
    std::shared_ptr<GdnCall> kernel;
    std::unique_ptr<StateExchanger> exchange;
};

struct GatedDeltaRuleFunction : Function<GatedDeltaRuleFunction> {
    static Variable forward(AutogradContext* ctx,
                            const Variable& q,
                            const Variable& k,
                            const Variable& v,
                            const Variable& g,
                            const Variable& beta,
                            const c10::intrusive_ptr<LocalCall>& call) {
        ctx->saved_data["call"] = c10::IValue::make_capsule(call);
        call->kernel = make_gdn_call(call->backend,
                                     {.q = q.detach(),
                                      .k = k.detach(),
                                      .v = v.detach(),
                                      .g = g.detach(),
                                      .beta = beta.detach()},
                                     call->segment_offsets, call->options);
        at::Tensor S_start;
        if (call->exchange) {
            S_start = call->exchange->start_states([&] { return call->kernel->summary(); });
        }
        const GdnOutput output = call->kernel->forward(S_start);
        if (call->exchange) {
            call->exchange->finish();
        }
        return output.o;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        const auto holder = ctx->saved_data["call"].toCapsule();
        const auto& call = static_cast<const LocalCall&>(*holder);
        const at::Tensor d_o = gradients[0].contiguous();
        at::Tensor dS_end;
        if (call.exchange) {
            dS_end =
                call.exchange->end_gradients([&] { return call.kernel->gradient_summary(d_o); });
        }
        const GdnGradients result = call.kernel->backward(d_o, dS_end);
        if (call.exchange) {
            call.exchange->finish();
        }
        return {result.dq, result.dk, result.dv, result.dg, result.dbeta, Variable()};
    }
};

c10::intrusive_ptr<LocalCall> make_local_call(const GdnOptions& options,
                                              std::vector<std::int64_t> segment_offsets,
                                              const CpContext& context) {
    auto call = c10::make_intrusive<LocalCall>();
    call->backend =
        context.parallel.reference_backend ? GdnBackend::kReference : GdnBackend::kEager;
    call->options = options;
    call->segment_offsets = std::move(segment_offsets);
    return call;
}

at::Tensor run_local(const GdnInputs& inputs, const c10::intrusive_ptr<LocalCall>& call) {
    return GatedDeltaRuleFunction::apply(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, call);
}

at::Tensor run_state_passing(const GdnInputs& inputs,
                             const GdnOptions& options,
                             const CpContext& context) {
    const auto call = make_local_call(options, context.plan->segment_offsets, context);
    const bool wide =
        call->backend == GdnBackend::kReference || inputs.q.scalar_type() == at::kDouble;
    const StateShape shape{
        .heads = inputs.v.size(1),
        .key_dim = inputs.q.size(2),
        .value_dim = inputs.v.size(2),
        .options = inputs.q.options().dtype(wide ? at::kDouble : at::kFloat).requires_grad(false)};
    if (context.plan->layout.num_ranks() > 1) {
        call->exchange = context.parallel.linear_attention_mode == LinearAttentionMode::kP2p
                             ? make_p2p_exchanger(context, shape)
                             : make_all_gather_exchanger(context, shape);
    }
    return run_local(inputs, call);
}

at::Tensor run_ulysses(const GdnInputs& inputs,
                       const GdnOptions& options,
                       const CpContext& context) {
    const std::int64_t group_size = inputs.v.size(1) / inputs.q.size(1);
    const HeadShards value_shards = split_heads(inputs.v.size(1), context.group->size());
    const HeadShards key_shards = shared_heads(value_shards, group_size);
    const std::vector<at::Tensor> shard = scatter_heads(
        {inputs.q, inputs.k, inputs.v, inputs.g.unsqueeze(2), inputs.beta.unsqueeze(2)},
        {key_shards, key_shards, value_shards, value_shards, value_shards}, "gdn_ulysses", context);
    GdnInputs local{.q = shard[0],
                    .k = shard[1],
                    .v = shard[2],
                    .g = shard[3].squeeze(2),
                    .beta = shard[4].squeeze(2)};
    const auto me = static_cast<std::size_t>(context.group->rank());
    const std::vector<std::int64_t> index =
        shared_head_index(value_shards[me], key_shards[me], group_size);
    if (!index.empty()) {
        const at::Tensor heads =
            at::tensor(index, at::TensorOptions().dtype(at::kLong)).to(local.q.device());
        local.q = local.q.index_select(1, heads);
        local.k = local.k.index_select(1, heads);
    }
    const auto call = make_local_call(options, context.plan->layout.document_offsets(), context);
    return gather_heads({run_local(local, call)}, {value_shards}, "gdn_ulysses", context)[0];
}

}  // namespace

at::Tensor gated_delta_rule_cp(const GdnInputs& inputs,
                               const GdnOptions& options,
                               const CpContext& context) {
    const BatchPlan& plan = *context.plan;
    HCP_CHECK_EQ(inputs.q.size(0), plan.num_local_tokens(),
                 "gated delta rule: local tokens of the plan");
    if (plan.layout.num_ranks() > 1 &&
        context.parallel.linear_attention_mode == LinearAttentionMode::kUlysses) {
        return run_ulysses(inputs, options, context);
    }
    return run_state_passing(inputs, options, context);
}

}  // namespace hybridcp
