#include "ops/gathered_attention.h"

#include <ATen/OpMathType.h>

#include "core/memory_class.h"
#include "ops/autograd.h"
#include "ops/exchange_tape.h"
#include "ops/token_gather.h"

namespace hybridcp {

namespace {

constexpr const char* kOp = "attention_kv";

struct Call : torch::CustomClassHolder {
    CpContext context;
    double scale = 1.0;
};

/// Keys and values travel in their own dtype; the attention over them and their gradients are in
/// fp32, so that parts of a gradient from several ranks are summed before they are rounded, as on
/// one rank.
AttentionPart gather_keys(const at::Tensor& q,
                          const at::Tensor& k,
                          const at::Tensor& v,
                          const Call& call) {
    const MemoryScope scope(MemoryClass::kExchange);
    const at::ScalarType wide = at::toOpMathType(k.scalar_type());
    const at::Tensor kv = gather_rows(at::cat({k, v}, 2), {.op = kOp, .dtype = wide},
                                      call.context);  // [T, Hkv, 2D]
    const std::int64_t dim = k.size(2);
    return {.q = q.to(wide),
            .k = kv.narrow(2, 0, dim),
            .v = kv.narrow(2, dim, dim),
            .blocks = call.context.plan->local_blocks,
            .scale = call.scale};
}

struct GatheredAttention : Function<GatheredAttention> {
    static Variable forward(AutogradContext* ctx,
                            const Variable& q,
                            const Variable& k,
                            const Variable& v,
                            const c10::intrusive_ptr<Call>& call) {
        ctx->saved_data["call"] = c10::IValue::make_capsule(call);
        ctx->save_for_backward({q, k, v});
        ExchangeTape* tape = call->context.tape;
        if (tape != nullptr && tape->replays()) {
            return tape->take(kOp).tensors[0];
        }
        const at::Tensor o = attend_whole(gather_keys(q, k, v, *call)).o.to(q.scalar_type());
        if (tape != nullptr) {
            tape->record({.op = kOp, .tensors = {o}});
        }
        return o;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        const auto holder = ctx->saved_data["call"].toCapsule();
        const auto& call = static_cast<const Call&>(*holder);
        const variable_list tensors = ctx->get_saved_variables();
        const at::Tensor &q = tensors[0], &k = tensors[1], &v = tensors[2];
        const AttentionPart whole = gather_keys(q, k, v, call);
        const AttentionGradients sums =
            attend_whole_backward(whole, gradients[0].to(whole.q.scalar_type()));
        const at::Tensor d_kv = sum_gathered(at::cat({sums.dk, sums.dv}, 2),
                                             {.op = kOp, .dtype = k.scalar_type()}, call.context);
        const std::int64_t dim = k.size(2);
        return {sums.dq.to(q.scalar_type()), d_kv.narrow(2, 0, dim), d_kv.narrow(2, dim, dim),
                Variable()};
    }
};

}  // namespace

at::Tensor gathered_attention(const at::Tensor& q,
                              const at::Tensor& k,
                              const at::Tensor& v,
                              double scale,
                              const CpContext& context) {
    auto call = c10::make_intrusive<Call>();
    call->context = context;
    call->scale = scale;
    return GatheredAttention::apply(q, k, v, call);
}

}  // namespace hybridcp
