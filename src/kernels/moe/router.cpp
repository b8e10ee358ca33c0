#include "kernels/moe/router.h"

#include <ATen/OpMathType.h>
#include <fmt/ranges.h>

#include "hybridcp/error.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Chosen {
    at::Tensor experts;        // [T, k]
    at::Tensor probabilities;  // [T, k]
};

// Not at::topk, which may order equal values in any way: a maximum is the first of its equals. It
// also needs no index of [T, E] as a sort does.
Chosen most_probable(const at::Tensor& probabilities, std::int64_t num_chosen) {
    at::Tensor left = probabilities.clone();
    std::vector<at::Tensor> experts;
    std::vector<at::Tensor> values;
    for (std::int64_t choice = 0; choice < num_chosen; ++choice) {
        const auto [value, expert] = at::max(left, 1, /*keepdim=*/true);  // [T, 1]
        left.scatter_(1, expert, -1.0);
        experts.push_back(expert);
        values.push_back(value);
    }
    return {at::cat(experts, 1), at::cat(values, 1)};
}

// Written out so that nothing of [T, E] is kept but the logits. The renormalised weights are a
// softmax over the chosen logits alone, hence their gradient.
struct Router : torch::autograd::Function<Router> {
    static variable_list forward(AutogradContext* context,
                                 const at::Tensor& logits,
                                 std::int64_t num_chosen) {
        const at::Tensor probabilities = router_probabilities(logits);
        const Chosen chosen = most_probable(probabilities, num_chosen);
        const at::Tensor weights = chosen.probabilities / chosen.probabilities.sum(1, true);
        context->save_for_backward({logits, chosen.experts, weights});
        context->mark_non_differentiable({chosen.experts});
        context->set_materialize_grads(false);
        return {chosen.experts, weights.to(logits.scalar_type(), false, /*copy=*/true),
                probabilities.sum(0, false, at::kDouble)};
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const variable_list saved = context->get_saved_variables();
        const at::Tensor &logits = saved[0], &experts = saved[1], &weights = saved[2];
        const at::Tensor &d_weights = gradients[1], &d_sums = gradients[2];
        at::Tensor d_logits;
        if (d_sums.defined()) {
            const at::Tensor probabilities = router_probabilities(logits);
            const at::Tensor d_row = d_sums.to(weights.scalar_type()).unsqueeze(0);  // [1, E]
            d_logits = probabilities * (d_row - (probabilities * d_row).sum(1, true));
        } else {
            d_logits = at::zeros(logits.sizes(), weights.options());
        }
        if (d_weights.defined()) {
            const at::Tensor wide = d_weights.to(weights.scalar_type());
            d_logits.scatter_add_(1, experts, weights * (wide - (weights * wide).sum(1, true)));
        }
        return {d_logits.to(logits.scalar_type()), at::Tensor()};
    }
};

}  // namespace

at::Tensor router_probabilities(const at::Tensor& logits) {
    return at::softmax(logits, 1, at::toOpMathType(logits.scalar_type()));
}

Routing route(const at::Tensor& logits, std::int64_t num_chosen) {
    HCP_CHECK(logits.dim() == 2 && num_chosen >= 1 && num_chosen <= logits.size(1),
              "route: each token chooses 1 to E of E experts, got {} for logits [{}] (they are "
              "[T, E])",
              num_chosen, fmt::join(logits.sizes(), ", "));
    const variable_list results = Router::apply(logits, num_chosen);
    const at::Tensor choices = results[0].flatten();
    const at::Tensor counts = at::zeros({logits.size(1)}, choices.options())
                                  .scatter_add_(0, choices, at::ones_like(choices));
    return {.experts = results[0],
            .weights = results[1],
            .counts = counts,
            .probability_sums = results[2]};
}

at::Tensor load_balancing_coefficients(const at::Tensor& counts, const at::Tensor& num_rows) {
    const at::Tensor rows = num_rows.to(at::kDouble).clamp_min(1.0);  // 0 counts over 0 rows is 0
    return counts.to(at::kDouble) * static_cast<double>(counts.size(0)) / (rows * rows);
}

}  // namespace hybridcp
