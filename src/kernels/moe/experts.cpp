#include "kernels/moe/experts.h"

#include <ATen/OpMathType.h>
#include <fmt/ranges.h>

#include "core/memory_class.h"
#include "hybridcp/error.h"
#include "kernels/linear/linear.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The N = T k pairs of a token and one of its choices, sorted by expert, then by token.
struct SortedPairs {
    at::Tensor order;                  // [N] token * k + choice
    at::Tensor tokens;                 // [N]
    std::vector<std::int64_t> counts;  // [E] pairs of each expert
};

SortedPairs sort_pairs(const at::Tensor& experts, const at::Tensor& counts) {
    SortedPairs pairs;
    pairs.order = at::argsort(experts.flatten(), /*stable=*/true, 0, /*descending=*/false);
    pairs.tokens = pairs.order.div(experts.size(1), "floor");
    const at::Tensor host = counts.to(at::kCPU).contiguous();
    const auto* data = host.const_data_ptr<std::int64_t>();
    pairs.counts.assign(data, data + host.numel());
    return pairs;
}

/// Calls body(expert, begin, count) for each expert that has pairs.
template <typename Body>
void for_each_expert(at::IntArrayRef counts, const Body& body) {
    std::int64_t begin = 0;
    for (std::size_t expert = 0; expert < counts.size(); ++expert) {
        if (counts[expert] > 0) {
            body(static_cast<std::int64_t>(expert), begin, counts[expert]);
        }
        begin += counts[expert];
    }
}

/// Gate and up projection of one expert's rows, [n, Fe] each, as they were computed.
struct Projected {
    explicit Projected(const at::Tensor& hidden)
        : gate(hidden.narrow(1, 0, hidden.size(1) / 2)),
          up(hidden.narrow(1, hidden.size(1) / 2, hidden.size(1) / 2)) {}
    at::Tensor gate;
    at::Tensor up;
};

/// The backward pass, one expert after another; gradients are filled where they are defined.
struct ExpertGradients {
    at::Tensor x, weights, gate_up, down;  // forward values; weights [N, 1] sorted
    at::Tensor dx = {};                    // [T, d] fp32
    at::Tensor d_weights = {};             // [N, 1] fp32, sorted
    at::Tensor d_gate_up = {};             // fp32
    at::Tensor d_down = {};                // fp32

    void add(std::int64_t expert,
             const at::Tensor& hidden,
             const at::Tensor& tokens,
             const at::Tensor& dy,
             std::int64_t begin) {
        const at::ScalarType dtype = x.scalar_type();
        const Projected projected(hidden);
        const at::Tensor silu = at::silu(projected.gate);
        const at::Tensor activated = silu * projected.up;  // [n, Fe]
        const at::Tensor weight = weights.narrow(0, begin, hidden.size(0));
        // The gradient of the activations but for the token's weight; against them it gives the
        // weight's own gradient, so that the expert's output is not needed.
        const at::Tensor unweighted = at::mm(dy, down[expert].to(dtype));
        if (d_weights.defined()) {
            at::Tensor rows = d_weights.narrow(0, begin, hidden.size(0));
            rows.copy_((unweighted.to(rows.scalar_type()) * activated).sum(1, true));
        }
        if (d_down.defined()) {
            d_down[expert].copy_(weight_gradient(dy, (activated * weight).to(dtype)));
        }
        if (!dx.defined() && !d_gate_up.defined()) {
            return;
        }
        const at::Tensor d_activated = (unweighted * weight).to(dtype);
        const at::Tensor d_hidden = at::cat(
            {at::silu_backward(d_activated * projected.up, projected.gate), d_activated * silu},
            1);  // [n, 2 Fe]
        if (dx.defined()) {
            dx.index_add_(0, tokens,
                          at::mm(d_hidden, gate_up[expert].to(dtype)).to(dx.scalar_type()));
        }
        if (d_gate_up.defined()) {
            d_gate_up[expert].copy_(weight_gradient(d_hidden, x.index_select(0, tokens)));
        }
    }
};

// Written out so that of the N = T k rows only the two projections are kept; autograd would keep
// the gathered inputs, the activations and the outputs too.
struct Experts : torch::autograd::Function<Experts> {
    /// inputs: x, weights, gate_up, down.
    static at::Tensor forward(AutogradContext* context,
                              at::TensorList inputs,
                              const at::Tensor& experts,
                              const at::Tensor& counts) {
        const at::Tensor &x = inputs[0], &weights = inputs[1], &gate_up = inputs[2],
                         &down = inputs[3];
        const at::ScalarType dtype = x.scalar_type();
        const at::ScalarType wide = at::toOpMathType(dtype);
        const SortedPairs pairs = sort_pairs(experts, counts);
        const at::Tensor pair_weights =
            weights.flatten().index_select(0, pairs.order).unsqueeze(1).to(wide);  // [N, 1]
        at::Tensor hidden = at::empty({pairs.order.size(0), gate_up.size(1)}, x.options());
        at::Tensor y = at::zeros(x.sizes(), x.options().dtype(wide));
        for_each_expert(
            pairs.counts, [&](std::int64_t expert, std::int64_t begin, std::int64_t count) {
                const at::Tensor tokens = pairs.tokens.narrow(0, begin, count);
                at::Tensor rows = hidden.narrow(0, begin, count);
                at::mm_out(rows, x.index_select(0, tokens), gate_up[expert].to(dtype).t());
                const Projected projected(rows);
                const at::Tensor output =
                    at::mm(at::silu(projected.gate).mul_(projected.up), down[expert].to(dtype).t());
                y.index_add_(0, tokens, output * pair_weights.narrow(0, begin, count));
            });
        context->save_for_backward(
            {x, pair_weights, gate_up, down, hidden, pairs.order, pairs.tokens});
        context->saved_data["counts"] = pairs.counts;
        context->saved_data["num_chosen"] = weights.size(1);
        context->saved_data["weights_dtype"] = weights.scalar_type();
        return y.to(dtype);
    }

    static variable_list backward(AutogradContext* context, variable_list upstream) {
        const variable_list saved = context->get_saved_variables();
        const at::Tensor &x = saved[0], &weights = saved[1], &gate_up = saved[2], &down = saved[3];
        const at::Tensor &hidden = saved[4], &order = saved[5], &tokens = saved[6];
        const at::Tensor& dy = upstream[0];
        const at::TensorOptions wide = weights.options();
        ExpertGradients gradients{.x = x, .weights = weights, .gate_up = gate_up, .down = down};
        const auto zeros_if = [&](std::size_t input, const at::Tensor& like) {
            return context->needs_input_grad(input) ? at::zeros(like.sizes(), wide) : at::Tensor();
        };
        gradients.dx = zeros_if(0, x);
        gradients.d_weights = zeros_if(1, weights);
        {
            const MemoryScope scope(MemoryClass::kGradients);
            gradients.d_gate_up = zeros_if(2, gate_up);
            gradients.d_down = zeros_if(3, down);
        }
        const std::vector<std::int64_t> counts = context->saved_data["counts"].toIntVector();
        for_each_expert(counts, [&](std::int64_t expert, std::int64_t begin, std::int64_t count) {
            const at::Tensor rows = tokens.narrow(0, begin, count);
            gradients.add(expert, hidden.narrow(0, begin, count), rows, dy.index_select(0, rows),
                          begin);
        });
        at::Tensor d_weights;
        if (gradients.d_weights.defined()) {
            const at::ScalarType dtype = context->saved_data["weights_dtype"].toScalarType();
            d_weights = at::empty_like(gradients.d_weights)
                            .index_copy_(0, order, gradients.d_weights)
                            .view({x.size(0), context->saved_data["num_chosen"].toInt()})
                            .to(dtype);
        }
        const at::Tensor dx =
            gradients.dx.defined() ? gradients.dx.to(x.scalar_type()) : at::Tensor();
        return {dx, d_weights, gradients.d_gate_up, gradients.d_down, at::Tensor(), at::Tensor()};
    }
};

}  // namespace

at::Tensor expert_mlp(const at::Tensor& x,
                      const Routing& routing,
                      const at::Tensor& gate_up,
                      const at::Tensor& down) {
    const bool fits = x.dim() == 2 && gate_up.dim() == 3 && down.dim() == 3 &&
                      gate_up.size(2) == x.size(1) && down.size(0) == gate_up.size(0) &&
                      down.size(1) == x.size(1) && 2 * down.size(2) == gate_up.size(1);
    HCP_CHECK(fits,
              "expert_mlp: x [T, d], gate_up [E, 2 Fe, d] and down [E, d, Fe] do not fit, got {}, "
              "{} and {}",
              fmt::join(x.sizes(), "x"), fmt::join(gate_up.sizes(), "x"),
              fmt::join(down.sizes(), "x"));
    HCP_CHECK(routing.experts.dim() == 2 && routing.experts.size(0) == x.size(0) &&
                  routing.weights.sizes() == routing.experts.sizes() &&
                  routing.counts.numel() == gate_up.size(0),
              "expert_mlp: the routing of {} tokens over {} experts does not fit x [{}] and {} "
              "experts",
              routing.experts.size(0), routing.counts.numel(), fmt::join(x.sizes(), ", "),
              gate_up.size(0));
    return Experts::apply(at::TensorList({x, routing.weights, gate_up, down}), routing.experts,
                          routing.counts);
}

}  // namespace hybridcp
