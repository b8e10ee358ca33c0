// The causal convolution's halo: the (W-1) rows before each local segment, from the ranks that hold
// them.

#include "core/memory_class.h"
#include "hybridcp/error.h"
#include "kernels/conv/causal_conv.h"
#include "ops/autograd.h"
#include "ops/context_parallel.h"
#include "ops/exchange_tape.h"
#include "ops/row_messages.h"

namespace hybridcp {

namespace {

constexpr const char* kOp = "conv_halo";

struct Saved : torch::CustomClassHolder {
    CpContext context;
    std::int64_t num_tokens = 0;
};

/// Moves rows from their owners to the halos (forward), or gradients from the halos to the owners.
/// `outgoing` and `incoming` are the two sides of the exchange, `from_row` and `to_row` the index
/// that each uses.
struct Move {
    const std::vector<RowMessage>& outgoing;
    const std::vector<RowMessage>& incoming;
    std::int64_t RowRun::* from_row;
    std::int64_t RowRun::* to_row;
};

void move_rows(const Move& move,
               const at::Tensor& from,
               at::Tensor& into,
               const CpContext& context) {
    std::vector<Message> sends;
    std::vector<Message> receives;
    for (const RowMessage& message : move.outgoing) {
        sends.push_back(
            {.tensor = pack_rows(from, message.runs, move.from_row), .peer = message.peer});
    }
    for (const RowMessage& message : move.incoming) {
        receives.push_back({.tensor = at::empty({message.num_rows, from.size(1)}, from.options()),
                            .peer = message.peer});
    }
    std::vector<Pending> pending = context.group->exchange(kOp, sends, receives);
    for (const RowRun& run : context.plan->halo.local) {
        into.narrow(0, run.*move.to_row, run.count) +=
            from.narrow(0, run.*move.from_row, run.count);
    }
    for (std::size_t i = 0; i < pending.size(); ++i) {
        pending[i].wait();
        if (i < receives.size()) {
            add_rows(into, receives[i].tensor, move.incoming[i].runs, move.to_row);
        }
    }
}

struct HaloFunction : Function<HaloFunction> {
    static Variable forward(AutogradContext* ctx, const Variable& x, const CpContext& context) {
        auto saved = c10::make_intrusive<Saved>();
        saved->context = context;
        saved->num_tokens = x.size(0);
        ctx->saved_data["saved"] = c10::IValue::make_capsule(saved);
        if (context.tape != nullptr && context.tape->replays()) {
            return context.tape->take(kOp).tensors[0];
        }
        const MemoryScope scope(MemoryClass::kExchange);
        const HaloExchange& halo = context.plan->halo;
        at::Tensor rows = at::zeros({halo.num_segments * (halo.width - 1), x.size(1)}, x.options());
        move_rows({.outgoing = halo.sends,
                   .incoming = halo.receives,
                   .from_row = &RowRun::source,
                   .to_row = &RowRun::target},
                  x, rows, context);
        rows = rows.view({halo.num_segments, halo.width - 1, x.size(1)});
        if (context.tape != nullptr) {
            context.tape->record({.op = kOp, .tensors = {rows}});
        }
        return rows;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        const auto holder = ctx->saved_data["saved"].toCapsule();
        const auto& saved = static_cast<const Saved&>(*holder);
        const MemoryScope scope(MemoryClass::kExchange);
        const HaloExchange& halo = saved.context.plan->halo;
        const at::Tensor d_rows =
            gradients[0].reshape({halo.num_segments * (halo.width - 1), gradients[0].size(2)});
        at::Tensor dx = at::zeros({saved.num_tokens, d_rows.size(1)}, d_rows.options());
        move_rows({.outgoing = halo.receives,
                   .incoming = halo.sends,
                   .from_row = &RowRun::target,
                   .to_row = &RowRun::source},
                  d_rows, dx, saved.context);
        return {dx, Variable()};
    }
};

void check_initial_rows(const at::Tensor& initial, const at::Tensor& x, const BatchPlan& plan) {
    HCP_CHECK(initial.dim() == 3 && initial.size(0) == plan.layout.num_documents() &&
                  initial.size(1) == plan.halo.width - 1 && initial.size(2) == x.size(1),
              "causal convolution: the initial rows must be [{} documents, {}, {} channels]",
              plan.layout.num_documents(), plan.halo.width - 1, x.size(1));
}

/// The halo with the rows that stand before the documents' first tokens.
at::Tensor add_initial_rows(const at::Tensor& halo,
                            const at::Tensor& initial,
                            const BatchPlan& plan) {
    const std::int64_t channels = initial.size(2);
    at::Tensor rows = halo.defined()
                          ? halo.reshape({-1, channels})
                          : at::zeros({plan.halo.num_segments * (plan.halo.width - 1), channels},
                                      initial.options().requires_grad(false));
    if (plan.conv_ends.halo_rows.defined()) {
        rows = rows.index_copy(
            0, plan.conv_ends.halo_rows,
            initial.reshape({-1, channels}).index_select(0, plan.conv_ends.halo_initial));
    }
    return rows.view({plan.halo.num_segments, plan.halo.width - 1, channels});
}

}  // namespace

Sharded causal_conv_silu_cp(const Sharded& x,
                            const at::Tensor& weight,
                            const CpContext& context,
                            const at::Tensor& initial) {
    const BatchPlan& plan = *context.plan;
    check_layout("causal convolution", {&x}, plan);
    HCP_CHECK_EQ(weight.size(1), plan.halo.width, "causal convolution: the plan's width");
    at::Tensor halo;  // [segments, W-1, C]
    if (plan.layout.num_ranks() > 1) {
        halo = HaloFunction::apply(x.local, context);
    }
    if (initial.defined()) {
        check_initial_rows(initial, x.local, plan);
        halo = add_initial_rows(halo, initial.to(x.local.scalar_type()), plan);
    }
    return x.with(causal_conv_silu(x.local, weight, halo, plan.segment_offsets));
}

at::Tensor conv_final_rows(const Sharded& x, const CpContext& context, const at::Tensor& initial) {
    const BatchPlan& plan = *context.plan;
    check_layout("causal convolution", {&x}, plan);
    const std::int64_t rows = plan.halo.width - 1;
    const std::int64_t channels = x.local.size(1);
    at::Tensor final = at::zeros({plan.layout.num_documents() * rows, channels}, x.local.options());
    if (plan.conv_ends.final_rows.defined()) {
        final = final.index_copy(0, plan.conv_ends.final_rows,
                                 x.local.index_select(0, plan.conv_ends.final_tokens));
    }
    if (initial.defined() && plan.conv_ends.final_kept.defined()) {
        check_initial_rows(initial, x.local, plan);
        final = final.index_copy(0, plan.conv_ends.final_kept,
                                 initial.to(x.local.scalar_type())
                                     .reshape({-1, channels})
                                     .index_select(0, plan.conv_ends.final_kept_initial));
    }
    return final.view({plan.layout.num_documents(), rows, channels});
}

}  // namespace hybridcp
