#include "ops/token_gather.h"

#include <ATen/OpMathType.h>

#include <algorithm>

#include "core/memory_class.h"
#include "ops/autograd.h"

namespace hybridcp {

namespace {

struct Saved : torch::CustomClassHolder {
    CpContext context;
    TokenGatherOptions options;
    at::ScalarType dtype = at::kFloat;  // of the local rows
};

struct GatherTokensFunction : Function<GatherTokensFunction> {
    static Variable forward(AutogradContext* ctx,
                            const Variable& local,
                            const TokenGatherOptions& options,
                            const CpContext& context) {
        auto saved = c10::make_intrusive<Saved>();
        saved->context = context;
        saved->options = options;
        saved->dtype = local.scalar_type();
        ctx->saved_data["saved"] = c10::IValue::make_capsule(saved);
        return gather_rows(local, options, context);
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        const auto holder = ctx->saved_data["saved"].toCapsule();
        const auto& saved = static_cast<const Saved&>(*holder);
        return {sum_gathered(gradients[0], {.op = saved.options.op, .dtype = saved.dtype},
                             saved.context),
                Variable(), Variable()};
    }
};

}  // namespace

at::Tensor gather_rows(const at::Tensor& local,
                       const TokenGatherOptions& options,
                       const CpContext& context) {
    const MemoryScope scope(MemoryClass::kExchange);
    const BatchPlan& plan = *context.plan;
    const std::int64_t longest =
        *std::max_element(plan.tokens_per_rank.begin(), plan.tokens_per_rank.end());
    at::Tensor padded = local.contiguous();
    if (local.size(0) < longest) {
        std::vector<std::int64_t> shape = local.sizes().vec();
        shape[0] = longest - local.size(0);
        padded = at::cat({padded, at::zeros(shape, local.options())});
    }
    const at::Tensor gathered = context.group->all_gather(options.op, padded);  // [P, longest, ...]
    std::vector<at::Tensor> shards;
    for (std::size_t r = 0; r < plan.tokens_per_rank.size(); ++r) {
        shards.push_back(
            gathered[static_cast<std::int64_t>(r)].narrow(0, 0, plan.tokens_per_rank[r]));
    }
    const at::Tensor rank_major = at::cat(shards);
    return (plan.rank_major_to_flat.defined() ? rank_major.index_select(0, plan.rank_major_to_flat)
                                              : rank_major)
        .to(options.dtype);
}

at::Tensor sum_gathered(const at::Tensor& gradient,
                        const TokenGatherOptions& options,
                        const CpContext& context) {
    const MemoryScope scope(MemoryClass::kExchange);
    const BatchPlan& plan = *context.plan;
    const at::Tensor rank_major = plan.flat_to_rank_major.defined()
                                      ? gradient.index_select(0, plan.flat_to_rank_major)
                                      : gradient.contiguous();
    const std::vector<std::int64_t> receive_rows(plan.tokens_per_rank.size(),
                                                 plan.num_local_tokens());
    const at::Tensor received =
        context.group->all_to_all(options.op, rank_major, plan.tokens_per_rank, receive_rows);
    std::vector<std::int64_t> shape = rank_major.sizes().vec();
    shape[0] = plan.num_local_tokens();
    shape.insert(shape.begin(), context.group->size());
    return received.view(shape).sum(0, false, at::toOpMathType(options.dtype)).to(options.dtype);
}

at::Tensor gather_tokens(const Sharded& local,
                         const TokenGatherOptions& options,
                         const CpContext& context) {
    check_layout(options.op, {&local}, *context.plan);
    return GatherTokensFunction::apply(local.local, options, context);
}

}  // namespace hybridcp
