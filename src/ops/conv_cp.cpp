// The causal convolution's halo: the (W-1) rows before each local segment, from the ranks that hold
// them.

#include "hybridcp/error.h"
#include "kernels/conv/causal_conv.h"
#include "ops/context_parallel.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

using Rows = std::vector<RowRun>;

struct Saved : torch::CustomClassHolder {
    CpContext context;
    std::int64_t num_tokens = 0;
};

at::Tensor pack_rows(const at::Tensor& from, const Rows& rows, std::int64_t RowRun::* at_row) {
    std::vector<at::Tensor> pieces;
    for (const RowRun& run : rows) {
        pieces.push_back(from.narrow(0, run.*at_row, run.count));
    }
    return at::cat(pieces);
}

/// Adds `message` to the rows of `into` where it belongs: several halos may read the same row.
void add_rows(at::Tensor& into,
              const at::Tensor& message,
              const Rows& rows,
              std::int64_t RowRun::* at_row) {
    std::int64_t offset = 0;
    for (const RowRun& run : rows) {
        into.narrow(0, run.*at_row, run.count) += message.narrow(0, offset, run.count);
        offset += run.count;
    }
}

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
    std::vector<at::Tensor> buffers;
    std::vector<Pending> receives;
    std::vector<Pending> sends;
    for (const RowMessage& message : move.incoming) {
        buffers.push_back(at::empty({message.num_rows, from.size(1)}, from.options()));
        receives.push_back(context.group->receive("conv_halo", buffers.back(), message.peer));
    }
    for (const RowMessage& message : move.outgoing) {
        sends.push_back(context.group->send(
            "conv_halo", pack_rows(from, message.runs, move.from_row), message.peer));
    }
    for (const RowRun& run : context.plan->halo.local) {
        into.narrow(0, run.*move.to_row, run.count) +=
            from.narrow(0, run.*move.from_row, run.count);
    }
    for (std::size_t i = 0; i < receives.size(); ++i) {
        receives[i].wait();
        add_rows(into, buffers[i], move.incoming[i].runs, move.to_row);
    }
    for (Pending& send : sends) {
        send.wait();
    }
}

struct HaloFunction : Function<HaloFunction> {
    static Variable forward(AutogradContext* ctx, const Variable& x, const CpContext& context) {
        auto saved = c10::make_intrusive<Saved>();
        saved->context = context;
        saved->num_tokens = x.size(0);
        ctx->saved_data["saved"] = c10::IValue::make_capsule(saved);
        const HaloExchange& halo = context.plan->halo;
        at::Tensor rows = at::zeros({halo.num_segments * (halo.width - 1), x.size(1)}, x.options());
        move_rows({.outgoing = halo.sends,
                   .incoming = halo.receives,
                   .from_row = &RowRun::source,
                   .to_row = &RowRun::target},
                  x, rows, context);
        return rows.view({halo.num_segments, halo.width - 1, x.size(1)});
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        const auto holder = ctx->saved_data["saved"].toCapsule();
        const auto& saved = static_cast<const Saved&>(*holder);
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

}  // namespace

at::Tensor causal_conv_silu_cp(const at::Tensor& x,
                               const at::Tensor& weight,
                               const CpContext& context) {
    const BatchPlan& plan = *context.plan;
    HCP_CHECK_EQ(weight.size(1), plan.halo.width, "causal convolution: the plan's width");
    HCP_CHECK_EQ(x.size(0), plan.num_local_tokens(),
                 "causal convolution: local tokens of the plan");
    if (plan.layout.num_ranks() == 1) {
        return causal_conv_silu(x, weight, at::Tensor(), plan.segment_offsets);
    }
    return causal_conv_silu(x, weight, HaloFunction::apply(x, context), plan.segment_offsets);
}

}  // namespace hybridcp
