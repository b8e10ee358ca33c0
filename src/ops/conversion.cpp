#include "ops/conversion.h"

#include <utility>

#include "comm/cpu_timer.h"
#include "core/memory_class.h"
#include "hybridcp/error.h"
#include "ops/autograd.h"
#include "ops/exchange_tape.h"
#include "ops/row_messages.h"

namespace hybridcp {

namespace {

constexpr const char* kOp = "conversion";

/// The rows of a selection: a view where they are one run.
at::Tensor take(const at::Tensor& x, const RowSelection& rows) {
    return rows.index.defined() ? x.index_select(0, rows.index)
                                : x.narrow(0, rows.first, rows.count);
}

void put(at::Tensor& into, const RowSelection& rows, const at::Tensor& values) {
    if (rows.index.defined()) {
        into.index_copy_(0, rows.index, values);
    } else {
        into.narrow(0, rows.first, rows.count).copy_(values);
    }
}

/// One message each way; it arrives in place where its rows stand together.
void swap_rows(at::Tensor& into, const at::Tensor& x, const Conversion& conversion, Group& group) {
    const RowSelection& received = conversion.received;
    std::vector<Message> sends;
    std::vector<Message> receives;
    if (conversion.sent.count > 0) {
        sends.push_back(
            {.tensor = take(x, conversion.sent), .peer = conversion.route.sends.front().peer});
    }
    at::Tensor buffer;
    if (received.count > 0) {
        buffer = received.index.defined() ? empty_rows(x, received.count) : take(into, received);
        receives.push_back({.tensor = buffer, .peer = conversion.route.receives.front().peer});
    }
    std::vector<Pending> pending = group.exchange(kOp, sends, receives);
    put(into, conversion.kept_target, take(x, conversion.kept_source));
    for (Pending& transfer : pending) {
        transfer.wait();
    }
    if (received.index.defined()) {
        put(into, received, buffer);
    }
}

at::Tensor move_rows(const at::Tensor& rows, const Conversion& conversion, Group& group) {
    const MemoryScope scope(MemoryClass::kExchange);
    const CpuTimer timer(group.recorder(), kOp);
    const at::Tensor x = rows.contiguous();
    at::Tensor into = empty_rows(x, conversion.route.num_target_rows);
    if (conversion.route.max_peers <= 1) {
        swap_rows(into, x, conversion, group);
        return into;
    }
    const at::Tensor arrived = group.all_to_all(kOp, take(x, conversion.sent),
                                                conversion.send_counts, conversion.receive_counts);
    put(into, conversion.kept_target, take(x, conversion.kept_source));
    put(into, conversion.received, arrived);
    return into;
}

/// The way taken and the way back.
struct Ways : torch::CustomClassHolder {
    std::shared_ptr<const Conversion> forward, backward;
    Group* group = nullptr;
    ExchangeTape* tape = nullptr;  // for the forward pass
};

struct ConversionFunction : Function<ConversionFunction> {
    static Variable forward(AutogradContext* ctx,
                            const Variable& x,
                            const c10::intrusive_ptr<Ways>& ways) {
        ctx->saved_data["ways"] = c10::IValue::make_capsule(ways);
        ExchangeTape* tape = std::exchange(ways->tape, nullptr);
        if (tape != nullptr && tape->replays()) {
            return tape->take(kOp).tensors[0];
        }
        at::Tensor moved = move_rows(x, *ways->forward, *ways->group);
        if (tape != nullptr) {
            tape->record({.op = kOp, .tensors = {moved}});
        }
        return moved;
    }
    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        const auto holder = ctx->saved_data["ways"].toCapsule();
        const auto& ways = static_cast<const Ways&>(*holder);
        return {move_rows(gradients[0], *ways.backward, *ways.group), Variable()};
    }
};

}  // namespace

Sharded convert(const Sharded& x, const LayoutTag& to, const CpContext& context) {
    const BatchPlan& plan = *context.plan;
    if (x.layout == to) {
        return x;
    }
    auto ways = c10::make_intrusive<Ways>();
    ways->group = context.group;
    ways->tape = context.tape;
    if (plan.to_linear && x.layout == plan.to_linear->from && to == plan.to_linear->to) {
        ways->forward = plan.to_linear;
        ways->backward = plan.from_linear;
    } else if (plan.to_linear && x.layout == plan.to_linear->to && to == plan.to_linear->from) {
        ways->forward = plan.from_linear;
        ways->backward = plan.to_linear;
    } else {
        throw UsageError(fmt::format(
            "conversion: this batch has no way from layout {} to {}: it was planned with {}{}",
            to_string(x.layout), to_string(to), to_string(plan.tag),
            plan.linear ? " and " + to_string(plan.linear->tag) : ""));
    }
    HCP_CHECK_EQ(x.local.size(0), ways->forward->route.num_source_rows,
                 "conversion: local tokens of the plan");
    return {ConversionFunction::apply(x.local, ways), to};
}

CpContext linear_attention_context(const CpContext& context) {
    CpContext linear = context;
    if (context.plan->linear) {
        linear.plan = context.plan->linear.get();
    }
    return linear;
}

}  // namespace hybridcp
