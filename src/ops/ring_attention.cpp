// Full attention round a ring. Legend: P ranks; held rows of keys and values [rows, 2, Hkv, D],
// keys first: one message carries both, and a run of rows is one piece of memory.

#include "ops/ring_attention.h"

#include "core/memory_class.h"
#include "kernels/attention/partial_attention.h"
#include "ops/autograd.h"
#include "ops/exchange_tape.h"
#include "ops/row_messages.h"

namespace hybridcp {

namespace {

constexpr const char* kOp = "attention_ring";

struct Call : torch::CustomClassHolder {
    CpContext context;
    double scale = 1.0;
};

at::Tensor keys_of(const at::Tensor& rows) {
    return rows.select(1, 0);
}

at::Tensor values_of(const at::Tensor& rows) {
    return rows.select(1, 1);
}

/// Several transfers posted together, and the rows that one of them brings.
struct Transfer {
    std::vector<Pending> pending;
    at::Tensor received;

    void wait() {
        for (Pending& transfer : pending) {
            transfer.wait();
        }
        pending.clear();
    }
};

/// Sends the rows of `message` from `rows` to its peer while as many as `num_received` come from
/// another; either may be none.
struct Swap {
    const char* op;
    const RowMessage& message;
    int from = 0;
    std::int64_t num_received = 0;
};

Transfer post(const Swap& swap, const at::Tensor& rows, const CpContext& context) {
    const MemoryScope scope(MemoryClass::kExchange);
    Transfer transfer{.pending = {}, .received = empty_rows(rows, swap.num_received)};
    std::vector<Message> sends;
    std::vector<Message> receives;
    if (swap.message.num_rows > 0) {
        sends.push_back({.tensor = pack_rows(rows, swap.message.runs, &RowRun::source),
                         .peer = swap.message.peer});
    }
    if (swap.num_received > 0) {
        receives.push_back({.tensor = transfer.received, .peer = swap.from});
    }
    transfer.pending = context.group->exchange(swap.op, sends, receives);
    return transfer;
}

/// The keys and values that this rank holds, step by step.
class KeyRing {
  public:
    KeyRing(const at::Tensor& k, const at::Tensor& v, const CpContext& context)
        : context_(context) {
        const MemoryScope scope(MemoryClass::kExchange);
        held_ = at::stack({k, v}, 1);
    }

    [[nodiscard]] const at::Tensor& held() const { return held_; }

    /// Sends on what others need of `held`, and starts to receive what comes next; both go on while
    /// the caller computes.
    void post_next(std::size_t step) {
        const RingSchedule& ring = context_.plan->ring;
        const int num_ranks = context_.group->size();
        next_ = post({.op = kOp,
                      .message = ring[step].send,
                      .from = (context_.group->rank() + 1) % num_ranks,
                      .num_received = step + 1 < ring.size() ? ring[step + 1].num_rows : 0},
                     held_, context_);
    }

    void advance() {
        next_.wait();
        held_ = next_.received;
    }

  private:
    const CpContext& context_;
    at::Tensor held_;
    Transfer next_;
};

/// Gradients of keys and values on the way back to the ranks that own them, and the sum of those
/// that come back here, by ascending step.
class GradientReturn {
  public:
    GradientReturn(at::Tensor own_rows, const CpContext& context)
        : context_(context), sum_(std::move(own_rows)) {}

    void post_step(const RingStep& step, const at::Tensor& rows) {
        last_step_ = &step;
        transfer_ = post({.op = "attention_ring_gradient",
                          .message = step.gradient_send,
                          .from = step.gradient_receive.peer,
                          .num_received = step.gradient_receive.num_rows},
                         rows, context_);
    }

    /// Adds what the step posted last brings.
    void collect() {
        if (last_step_ == nullptr) {
            return;
        }
        transfer_.wait();
        add_rows(sum_, transfer_.received, last_step_->gradient_receive.runs, &RowRun::target);
        last_step_ = nullptr;
    }

    [[nodiscard]] const at::Tensor& sum() const { return sum_; }

  private:
    const CpContext& context_;
    at::Tensor sum_;
    Transfer transfer_;
    const RingStep* last_step_ = nullptr;
};

/// The forward pass: o, its log-sum-exp, and what rounding o to bf16 takes away. Backward needs
/// <d_o, o> as exact as on one rank, where it comes from the weights, and half the bytes of an fp32
/// copy say it.
std::vector<at::Tensor> attend_ring(const at::Tensor& q,
                                    const at::Tensor& k,
                                    const at::Tensor& v,
                                    const Call& call) {
    const CpContext& context = call.context;
    KeyRing ring(k, v, context);
    AttentionOutput sum = attention_to_no_keys(q);
    for (std::size_t step = 0; step < context.plan->ring.size(); ++step) {
        ring.post_next(step);
        const std::vector<AttentionBlock>& blocks = context.plan->ring_blocks[step];
        if (!blocks.empty()) {  // a rank may only pass rows on
            attend({.q = q,
                    .k = keys_of(ring.held()),
                    .v = values_of(ring.held()),
                    .blocks = blocks,
                    .scale = call.scale},
                   sum);
        }
        ring.advance();
    }
    const at::Tensor o = sum.o.to(q.scalar_type());
    const at::Tensor rounding =
        o.scalar_type() == sum.o.scalar_type() ? at::Tensor() : (sum.o - o).to(o.scalar_type());
    return {o, sum.lse, rounding};
}

struct RingAttention : Function<RingAttention> {
    static Variable forward(AutogradContext* ctx,
                            const Variable& q,
                            const Variable& k,
                            const Variable& v,
                            const c10::intrusive_ptr<Call>& call) {
        ctx->saved_data["call"] = c10::IValue::make_capsule(call);
        ExchangeTape* tape = call->context.tape;
        const bool replays = tape != nullptr && tape->replays();
        const std::vector<at::Tensor> kept =
            replays ? tape->take(kOp).tensors : attend_ring(q, k, v, *call);
        if (tape != nullptr && !replays) {
            tape->record({.op = kOp, .tensors = kept});
        }
        ctx->save_for_backward({q, k, v, kept[0], kept[1], kept[2]});
        return kept[0];
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        const auto holder = ctx->saved_data["call"].toCapsule();
        const auto& call = static_cast<const Call&>(*holder);
        const BatchPlan& plan = *call.context.plan;
        const variable_list tensors = ctx->get_saved_variables();
        const at::Tensor &q = tensors[0], &k = tensors[1], &v = tensors[2];
        const at::Tensor &lse = tensors[4], &rounding = tensors[5];
        at::Tensor o = tensors[3].to(lse.scalar_type());
        if (rounding.defined()) {
            o = o + rounding;
        }
        const AttentionRows rows = make_attention_rows({.o = o, .lse = lse}, gradients[0]);
        const at::Tensor dq = at::zeros_like(o);
        KeyRing ring(k, v, call.context);
        const auto zeros_like_held = [&] {
            const MemoryScope scope(MemoryClass::kExchange);
            return at::zeros(ring.held().sizes(), o.options());
        };
        GradientReturn returned(zeros_like_held(), call.context);
        for (std::size_t step = 0; step < plan.ring.size(); ++step) {
            ring.post_next(step);
            const at::Tensor d_held = step == 0 ? returned.sum() : zeros_like_held();
            if (!plan.ring_blocks[step].empty()) {
                attend_backward({.q = q,
                                 .k = keys_of(ring.held()),
                                 .v = values_of(ring.held()),
                                 .blocks = plan.ring_blocks[step],
                                 .scale = call.scale},
                                rows, {.dq = dq, .dk = keys_of(d_held), .dv = values_of(d_held)});
            }
            returned.collect();  // what the step before sent had this step's time
            if (step > 0) {
                returned.post_step(plan.ring[step], d_held);
            }
            ring.advance();
        }
        returned.collect();
        return {dq.to(q.scalar_type()), keys_of(returned.sum()).to(k.scalar_type()),
                values_of(returned.sum()).to(v.scalar_type()), Variable()};
    }
};

}  // namespace

at::Tensor ring_attention(const at::Tensor& q,
                          const at::Tensor& k,
                          const at::Tensor& v,
                          double scale,
                          const CpContext& context) {
    auto call = c10::make_intrusive<Call>();
    call->context = context;
    call->scale = scale;
    return RingAttention::apply(q, k, v, call);
}

}  // namespace hybridcp
