#include "kernels/linear/linear.h"

#include <ATen/OpMathType.h>
#include <fmt/ranges.h>

#include "core/memory_class.h"
#include "hybridcp/error.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Linear : torch::autograd::Function<Linear> {
    static at::Tensor forward(AutogradContext* context,
                              const at::Tensor& x,
                              const at::Tensor& weight) {
        context->save_for_backward({x, weight});
        return at::mm(x, weight.to(x.scalar_type()).t());
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const variable_list saved = context->get_saved_variables();
        const at::Tensor &x = saved[0], &weight = saved[1], &dy = gradients[0];
        at::Tensor dx, d_weight;
        if (context->needs_input_grad(0)) {
            dx = at::mm(dy, weight.to(dy.scalar_type()));
        }
        if (context->needs_input_grad(1)) {
            d_weight = weight_gradient(dy, x);
        }
        return {dx, d_weight};
    }
};

}  // namespace

at::Tensor linear_projection(const at::Tensor& x, const at::Tensor& weight) {
    HCP_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
              "linear_projection: x [T, in] and weight [out, in] do not fit, got {} and {}",
              fmt::join(x.sizes(), "x"), fmt::join(weight.sizes(), "x"));
    return Linear::apply(x, weight);
}

at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x) {
    const at::ScalarType wide = at::toOpMathType(x.scalar_type());
    if (dy.is_cuda() && wide != x.scalar_type()) {
        const MemoryScope scope(MemoryClass::kGradients);
        return at::mm(dy.t(), x, wide);  // only there does ATen have a product of bf16 into fp32
    }
    const at::Tensor wide_dy = dy.to(wide), wide_x = x.to(wide);
    const MemoryScope scope(MemoryClass::kGradients);
    return at::mm(wide_dy.t(), wide_x);
}

}  // namespace hybridcp
