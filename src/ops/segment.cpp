#include "ops/segment.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <optional>
#include <utility>

#include "hybridcp/error.h"
#include "ops/autograd.h"

namespace hybridcp {

namespace {

/// The function's own graph, from its inputs as leaves.
struct InnerGraph {
    variable_list leaves;
    variable_list outputs;
};

struct Segment : torch::CustomClassHolder {
    SegmentFunction function;
    SegmentOptions options;
    std::optional<ExchangeTape> tape;  // with recompute
    std::optional<InnerGraph> kept;    // without
    std::vector<bool> is_defined;      // which outputs are
    bool is_done = false;
};

void call(const std::function<void()>& hook) {
    if (hook) {
        hook();
    }
}

InnerGraph run_inner(Segment& segment, const variable_list& inputs) {
    const at::AutoGradMode with_grad(true);
    InnerGraph inner;
    for (const Variable& input : inputs) {
        inner.leaves.push_back(input.detach().set_requires_grad(input.requires_grad()));
    }
    inner.outputs = segment.function(inner.leaves, segment.tape ? &*segment.tape : nullptr);
    return inner;
}

/// The first pass. Outputs without their history.
variable_list run_first(Segment& segment, const variable_list& inputs) {
    variable_list outputs;
    if (segment.options.recompute) {
        segment.tape.emplace();
        outputs = segment.function(inputs, &*segment.tape);
    } else {
        segment.kept = run_inner(segment, inputs);
        outputs = segment.kept->outputs;
    }
    for (Variable& output : outputs) {
        output = output.defined() ? output.detach() : output;
    }
    return outputs;
}

InnerGraph run_again(Segment& segment, const variable_list& inputs) {
    segment.tape->start_replay();
    InnerGraph inner = run_inner(segment, inputs);
    segment.tape->check_taken();
    segment.tape.reset();
    return inner;
}

/// From the gradients of the outputs to those of parameters, in their leaves, and of the inputs.
variable_list run_backward(InnerGraph inner,
                           const std::vector<bool>& is_defined,
                           const variable_list& gradients) {
    torch::autograd::edge_list roots;
    variable_list root_gradients;
    std::size_t next = 0;
    for (std::size_t i = 0; i < is_defined.size(); ++i) {
        if (!is_defined[i]) {
            continue;
        }
        const Variable& gradient = gradients[next++];
        if (gradient.defined() && inner.outputs[i].requires_grad()) {
            roots.push_back(torch::autograd::impl::gradient_edge(inner.outputs[i]));
            root_gradients.push_back(gradient);
        }
    }
    inner.outputs.clear();  // only their edges are needed, not what they hold
    if (!roots.empty()) {
        (void)torch::autograd::Engine::get_default_engine().execute(
            roots, root_gradients, /*keep_graph=*/false, /*create_graph=*/false,
            /*accumulate_grad=*/true, /*outputs=*/{});
    }
    variable_list results;
    for (const Variable& leaf : inner.leaves) {
        results.push_back(leaf.grad());
    }
    return results;
}

struct SegmentNode : Function<SegmentNode> {
    /// The last input only makes outputs require a gradient, for the parameters' sake.
    static variable_list forward(AutogradContext* ctx,
                                 at::TensorList inputs,
                                 const c10::intrusive_ptr<Segment>& segment) {
        ctx->saved_data["segment"] = c10::IValue::make_capsule(segment);
        ctx->set_materialize_grads(false);
        const variable_list own = inputs.slice(0, inputs.size() - 1).vec();
        variable_list defined;
        variable_list without_gradient;
        for (const Variable& output : run_first(*segment, own)) {
            segment->is_defined.push_back(output.defined());
            if (output.defined()) {
                defined.push_back(output);
                if (!output.is_floating_point()) {
                    without_gradient.push_back(output);
                }
            }
        }
        ctx->mark_non_differentiable(without_gradient);
        if (segment->options.recompute) {
            ctx->save_for_backward(own);
        }
        return defined;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        const auto holder = ctx->saved_data["segment"].toCapsule();
        auto& segment = static_cast<Segment&>(*holder);
        HCP_CHECK(!at::GradMode::is_enabled(), "a segment's backward cannot be differentiated");
        HCP_CHECK(!std::exchange(segment.is_done, true), "a segment's backward can run only once");
        call(segment.options.hooks.before_backward);
        variable_list results;
        {
            InnerGraph inner = segment.kept ? *std::exchange(segment.kept, std::nullopt)
                                            : run_again(segment, ctx->get_saved_variables());
            results = run_backward(std::move(inner), segment.is_defined, gradients);
        }
        call(segment.options.hooks.after_backward);
        results.resize(results.size() + 2);  // of the last input and of the segment itself
        return results;
    }
};

}  // namespace

std::vector<at::Tensor> run_segment(const std::vector<at::Tensor>& inputs,
                                    SegmentFunction function,
                                    SegmentOptions options) {
    const SegmentHooks& hooks = options.hooks;
    call(hooks.before_forward);
    const bool is_node = at::GradMode::is_enabled() &&
                         (options.recompute || hooks.before_backward || hooks.after_backward);
    if (!is_node) {
        variable_list outputs = function(inputs, nullptr);
        call(hooks.after_forward);
        return outputs;
    }
    auto segment = c10::make_intrusive<Segment>();
    segment->function = std::move(function);
    segment->options = std::move(options);
    variable_list all = inputs;
    all.push_back(at::empty({0}, at::kFloat).set_requires_grad(true));
    const variable_list defined = SegmentNode::apply(at::TensorList(all), segment);
    call(segment->options.hooks.after_forward);
    variable_list outputs;
    std::size_t next = 0;
    for (const bool is_defined : segment->is_defined) {
        outputs.push_back(is_defined ? defined[next++] : Variable());
    }
    return outputs;
}

}  // namespace hybridcp
