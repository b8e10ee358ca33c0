// The gated delta rule over ranks. One autograd function serves one rank, p2p, all_gather and scan
// (they differ in the exchange of boundary states); ulysses wraps it in two head exchanges and runs
// it on whole documents. Documents that go on from an earlier call are absorbed into the summaries:
// the first segment's S becomes S + M S_initial, the last one's dS becomes dS + M^T dS_final, so
// that no exchange knows of them.

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

#include "core/memory_class.h"
#include "hybridcp/error.h"
#include "ops/autograd.h"
#include "ops/context_parallel.h"
#include "ops/exchange_tape.h"
#include "ops/head_exchange.h"
#include "ops/state_exchange.h"

namespace hybridcp {

namespace {

/// What one call keeps for its backward: the kernel call and the exchange (null where nothing is
/// exchanged).
struct LocalCall : torch::CustomClassHolder {
    GdnBackend backend = GdnBackend::kEager;
    GdnOptions options;
    GdnSegments segments = GdnSegments({0});
    DocumentEnds ends;
    StateShape shape;
    bool has_initial = false;
    bool want_final = false;
    std::shared_ptr<GdnCall> kernel;
    std::shared_ptr<StateExchanger> exchange;
    ExchangeTape* tape = nullptr;  // for the forward pass, where states are exchanged
    Recorder* recorder = nullptr;  // of the group that exchanges
    at::Tensor M;                  // [segments, Hv, K, K], once something needs it

    /// When the last owner is gone; a weak pointer keeps the rest.
    void release_resources() override {
        kernel.reset();
        exchange.reset();
        M.reset();
    }
    [[nodiscard]] std::int64_t num_segments() const {
        return static_cast<std::int64_t>(segments.offsets().size()) - 1;
    }
    [[nodiscard]] at::Tensor zeros(std::int64_t count) const {
        return at::zeros(shape.of(count), shape.options);
    }
    [[nodiscard]] const at::Tensor& summary_M() {
        if (!M.defined()) {
            M = kernel->summary().M;
        }
        return M;
    }
};

/// What the backward node knows of its call. The call itself, with all that the kernel keeps, hangs
/// on a variable that the node saves, because autograd frees those once backward has run.
struct SavedCall : torch::CustomClassHolder {
    explicit SavedCall(const c10::intrusive_ptr<LocalCall>& of) : call(of) {}
    c10::weak_intrusive_ptr<LocalCall> call;
};

at::Tensor variable_that_holds(const c10::intrusive_ptr<LocalCall>& call) {
    return at::from_blob(call.get(), {0}, [call](void* /*data*/) {}, at::kByte);
}

/// into[to] = from[rows]; nothing where there are none.
void copy_states(at::Tensor& into,
                 const at::Tensor& to,
                 const at::Tensor& from,
                 const at::Tensor& rows) {
    if (to.defined()) {
        into.index_copy_(0, to, from.index_select(0, rows).to(into.scalar_type()));
    }
}

/// into[rows] += M[rows] states
void absorb(at::Tensor& into,
            const at::Tensor& M,
            const at::Tensor& rows,
            const at::Tensor& states) {
    into.index_add_(0, rows, at::matmul(M.index_select(0, rows), states.to(into.scalar_type())));
}

constexpr const char* kTapeName = "gdn_state";

/// S_start of the local segments, from other ranks and from earlier calls; undefined for zeros.
at::Tensor exchange_start_states(LocalCall& call, const at::Tensor& initial) {
    const MemoryScope exchange_scope(MemoryClass::kExchange);
    at::Tensor S_start;
    if (call.exchange) {
        const auto summarize = [&] {
            const MemoryScope scope(MemoryClass::kLinearAttention);
            GdnSummary summary = call.kernel->summary();
            call.M = summary.M;
            if (call.has_initial && call.ends.first_segments.defined()) {
                absorb(summary.S, summary.M, call.ends.first_segments,
                       initial.index_select(0, call.ends.first_documents));
            }
            return summary;
        };
        const std::vector<bool>* independent = call.kernel->independent();
        if (independent != nullptr) {
            call.recorder->add_share("gdn_forgetting_heads",
                                     std::count(independent->begin(), independent->end(), true),
                                     static_cast<std::int64_t>(independent->size()));
        }
        S_start = call.exchange->start_states({.summarize = summarize, .independent = independent});
    }
    if (call.has_initial) {
        S_start = S_start.defined() ? S_start : call.zeros(call.num_segments());
        copy_states(S_start, call.ends.first_segments, initial, call.ends.first_documents);
    }
    return S_start;
}

/// The same, from the tape when it replays: with the exchanger, whose M the backward pass needs.
at::Tensor start_states(LocalCall& call, const at::Tensor& initial) {
    ExchangeTape* tape = std::exchange(call.tape, nullptr);
    if (tape != nullptr && tape->replays()) {
        TapeEntry kept = tape->take(kTapeName);
        call.exchange = std::move(kept.exchanger);
        return kept.tensors[0];
    }
    const at::Tensor S_start = exchange_start_states(call, initial);
    if (tape != nullptr) {
        tape->record({.op = kTapeName, .tensors = {S_start}, .exchanger = call.exchange});
    }
    return S_start;
}

/// dS_end of the local segments, from other ranks and from later calls; undefined for zeros.
at::Tensor end_gradients(LocalCall& call, const at::Tensor& d_o, const at::Tensor& d_final) {
    const bool has_final = call.want_final && call.ends.last_segments.defined();
    const MemoryScope exchange_scope(MemoryClass::kExchange);
    at::Tensor dS_end;
    if (call.exchange) {
        dS_end = call.exchange->end_gradients([&] {
            const MemoryScope scope(MemoryClass::kLinearAttention);
            at::Tensor dS = call.kernel->gradient_summary(d_o);
            if (has_final) {
                absorb(dS, call.summary_M().transpose(-1, -2), call.ends.last_segments,
                       d_final.index_select(0, call.ends.last_documents));
            }
            return dS;
        });
    }
    if (has_final) {
        dS_end = dS_end.defined() ? dS_end : call.zeros(call.num_segments());
        copy_states(dS_end, call.ends.last_segments, d_final, call.ends.last_documents);
    }
    return dS_end;
}

struct GatedDeltaRuleFunction : Function<GatedDeltaRuleFunction> {
    /// `initial` is [N, Hv, K, V] or has no element. Returns o and the final states, which have no
    /// element unless they are asked for.
    static variable_list forward(AutogradContext* ctx,
                                 at::TensorList inputs,  // q, k, v, g, beta, initial
                                 const c10::intrusive_ptr<LocalCall>& call) {
        ctx->saved_data["call"] = c10::IValue::make_capsule(c10::make_intrusive<SavedCall>(call));
        ctx->save_for_backward({variable_that_holds(call)});
        const at::Tensor& initial = inputs[5];
        call->kernel = make_gdn_call(
            call->backend,
            {.q = inputs[0], .k = inputs[1], .v = inputs[2], .g = inputs[3], .beta = inputs[4]},
            call->segments, call->options);
        const GdnOutput output = call->kernel->forward(start_states(*call, initial));
        if (call->exchange) {
            call->exchange->finish();
        }
        if (!call->options.keep_intermediates) {
            call->kernel->release_intermediates();
        }
        at::Tensor final_states = call->zeros(call->want_final ? call->ends.num_documents : 0);
        if (call->want_final) {
            copy_states(final_states, call->ends.last_documents, output.S_end,
                        call->ends.last_segments);
            if (call->has_initial) {
                copy_states(final_states, call->ends.empty_documents, initial,
                            call->ends.empty_documents);
            }
        }
        return {output.o, final_states};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        const variable_list saved = ctx->get_saved_variables();  // refused where they are freed
        const auto holder = ctx->saved_data["call"].toCapsule();
        const auto locked = static_cast<const SavedCall&>(*holder).call.lock();
        LocalCall& call = *locked;
        const at::Tensor d_o = gradients[0].contiguous();
        const at::Tensor& d_final = gradients[1];
        const GdnGradients result = call.kernel->backward(d_o, end_gradients(call, d_o, d_final));
        if (call.exchange) {
            call.exchange->finish();
        }
        Variable d_initial;
        if (call.has_initial) {
            d_initial = call.zeros(call.ends.num_documents);
            copy_states(d_initial, call.ends.first_documents, result.dS_start,
                        call.ends.first_segments);
            if (call.want_final) {
                copy_states(d_initial, call.ends.empty_documents, d_final,
                            call.ends.empty_documents);
            }
        }
        return {result.dq, result.dk, result.dv, result.dg, result.dbeta, d_initial, Variable()};
    }
};

/// The inputs of a call as plain tensors.
struct LocalInputs {
    GdnInputs tokens;
    DocumentStates documents;
};

GdnBackend kernel_backend(LinearAttentionBackend backend) {
    return backend == LinearAttentionBackend::kReference ? GdnBackend::kReference
           : backend == LinearAttentionBackend::kFused   ? GdnBackend::kFused
                                                         : GdnBackend::kEager;
}

c10::intrusive_ptr<LocalCall> make_local_call(const LocalInputs& inputs,
                                              const GdnOptions& options,
                                              const CpContext& context) {
    auto call = c10::make_intrusive<LocalCall>();
    call->backend = kernel_backend(context.parallel.linear_attention_backend);
    call->options = options;
    if (!options.summary_floor) {
        call->options.summary_floor =
            context.parallel.exact_summaries ? GdnOptions::kExactSummary : GdnOptions::kFastSummary;
    }
    const GdnInputs& in = inputs.tokens;
    const bool wide = call->backend == GdnBackend::kReference || in.q.scalar_type() == at::kDouble;
    call->shape = {
        .heads = in.v.size(1),
        .key_dim = in.q.size(2),
        .value_dim = in.v.size(2),
        .options = in.q.options().dtype(wide ? at::kDouble : at::kFloat).requires_grad(false)};
    call->has_initial = inputs.documents.initial.defined();
    call->want_final = inputs.documents.want_final;
    // In the second pass of a checkpointed segment backward is next.
    call->options.keep_intermediates = context.tape != nullptr && context.tape->replays();
    return call;
}

variable_list run_local(const LocalInputs& inputs, const c10::intrusive_ptr<LocalCall>& call) {
    if (call->has_initial &&
        inputs.documents.initial.sizes() != call->shape.of(call->ends.num_documents)) {
        throw UsageError(fmt::format(
            "gated delta rule: the initial states have {} documents, the batch has {}, or another "
            "shape than [documents, value heads, key dim, value dim]",
            inputs.documents.initial.size(0), call->ends.num_documents));
    }
    const GdnInputs& in = inputs.tokens;
    const at::Tensor initial =
        call->has_initial ? inputs.documents.initial : at::empty({0}, call->shape.options);
    return GatedDeltaRuleFunction::apply(at::TensorList({in.q, in.k, in.v, in.g, in.beta, initial}),
                                         call);
}

variable_list run_state_passing(const LocalInputs& inputs,
                                const GdnOptions& options,
                                const CpContext& context) {
    const auto call = make_local_call(inputs, options, context);
    call->segments = context.plan->segments;
    call->ends = context.plan->segment_ends;
    if (context.plan->layout.num_ranks() > 1) {
        call->recorder = &context.group->recorder();
        call->tape = context.tape;
        switch (context.parallel.linear_attention_mode) {
            case LinearAttentionMode::kP2p:
                call->exchange = make_p2p_exchanger(context, call->shape);
                break;
            case LinearAttentionMode::kAllGather:
                call->exchange = make_all_gather_exchanger(context, call->shape);
                break;
            case LinearAttentionMode::kScan:
                call->exchange = make_scan_exchanger(context, call->shape);
                break;
            case LinearAttentionMode::kUlysses:
            case LinearAttentionMode::kGatherHidden:
                throw UsageError(
                    "gated delta rule: gather_hidden gathers the input of the layer, not its "
                    "heads: run the op in the plan of the whole documents");
        }
    }
    return run_local(inputs, call);
}

variable_list run_ulysses(const LocalInputs& inputs,
                          const GdnOptions& options,
                          const CpContext& context) {
    const GdnInputs& in = inputs.tokens;
    const std::int64_t group_size = in.v.size(1) / in.q.size(1);
    const HeadShards value_shards = split_heads(in.v.size(1), context.group->size());
    const HeadShards key_shards = shared_heads(value_shards, group_size);
    const std::vector<at::Tensor> shard = scatter_heads(
        {in.q, in.k, in.v, in.g.unsqueeze(2), in.beta.unsqueeze(2)},
        {key_shards, key_shards, value_shards, value_shards, value_shards}, "gdn_ulysses", context);
    LocalInputs local{.tokens = {.q = shard[0],
                                 .k = shard[1],
                                 .v = shard[2],
                                 .g = shard[3].squeeze(2),
                                 .beta = shard[4].squeeze(2)},
                      .documents = inputs.documents};
    const at::Tensor heads = shared_head_index(value_shards, key_shards, context.group->rank(),
                                               {group_size, in.q.device()});
    if (heads.defined()) {
        local.tokens.q = local.tokens.q.index_select(1, heads);
        local.tokens.k = local.tokens.k.index_select(1, heads);
    }
    const HeadRange& own = value_shards[static_cast<std::size_t>(context.group->rank())];
    if (inputs.documents.initial.defined()) {
        local.documents.initial = inputs.documents.initial.narrow(1, own.begin, own.count);
    }
    const auto call = make_local_call(local, options, context);
    call->segments = context.plan->documents;
    call->ends = context.plan->document_ends;
    const variable_list result = run_local(local, call);
    const at::Tensor o = gather_heads({result[0]}, {value_shards}, "gdn_ulysses", context)[0];
    if (!call->want_final) {
        return {o, result[1]};
    }
    const std::int64_t after = in.v.size(1) - own.begin - own.count;
    return {o, at::constant_pad_nd(result[1], {0, 0, 0, 0, own.begin, after})};
}

}  // namespace

GdnResult gated_delta_rule_cp(const GdnShards& inputs,
                              const GdnOptions& options,
                              const CpContext& context,
                              const DocumentStates& documents) {
    const BatchPlan& plan = *context.plan;
    check_layout("gated delta rule", {&inputs.q, &inputs.k, &inputs.v, &inputs.g, &inputs.beta},
                 plan);
    const LocalInputs local{.tokens = {.q = inputs.q.local,
                                       .k = inputs.k.local,
                                       .v = inputs.v.local,
                                       .g = inputs.g.local,
                                       .beta = inputs.beta.local},
                            .documents = documents};
    const bool ulysses = plan.layout.num_ranks() > 1 &&
                         context.parallel.linear_attention_mode == LinearAttentionMode::kUlysses;
    const variable_list result =
        ulysses ? run_ulysses(local, options, context) : run_state_passing(local, options, context);
    return {.o = inputs.q.with(result[0]),
            .states = documents.want_final ? result[1] : at::Tensor()};
}

}  // namespace hybridcp
