#include "kernels/mlp/swiglu.h"

#include <fmt/ranges.h>

#include "hybridcp/error.h"
#include "kernels/linear/linear.h"
#include "kernels/mlp/activation.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Written out because autograd would keep silu(a) and silu(a) * b too: two more [T, F] tensors a
// layer.
struct Swiglu : torch::autograd::Function<Swiglu> {
    static at::Tensor forward(AutogradContext* context,
                              const at::Tensor& x,
                              const at::Tensor& gate,
                              const at::Tensor& up,
                              const at::Tensor& down) {
        const at::Tensor a = at::mm(x, gate.to(x.scalar_type()).t());  // [T, F]
        const at::Tensor b = at::mm(x, up.to(x.scalar_type()).t());
        context->save_for_backward({x, gate, up, down, a, b});
        return at::mm(swiglu_activation(a, b), down.to(x.scalar_type()).t());
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const variable_list saved = context->get_saved_variables();
        const at::Tensor &x = saved[0], &gate = saved[1], &up = saved[2], &down = saved[3];
        const at::Tensor &a = saved[4], &b = saved[5], &dy = gradients[0];
        at::Tensor dx, d_gate, d_up, d_down;
        const bool with_down = context->needs_input_grad(3);
        const auto [activated, da, db] = swiglu_activation_backward(
            at::mm(dy, down.to(dy.scalar_type())), a, b, /*with_activated=*/with_down);  // [T, F]
        if (with_down) {
            d_down = weight_gradient(dy, activated);
        }
        if (context->needs_input_grad(0)) {
            dx = at::mm(da, gate.to(da.scalar_type())).addmm_(db, up.to(db.scalar_type()));
        }
        if (context->needs_input_grad(1)) {
            d_gate = weight_gradient(da, x);
        }
        if (context->needs_input_grad(2)) {
            d_up = weight_gradient(db, x);
        }
        return {dx, d_gate, d_up, d_down};
    }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& x,
                  const at::Tensor& gate,
                  const at::Tensor& up,
                  const at::Tensor& down) {
    HCP_CHECK(x.dim() == 2 && gate.dim() == 2 && up.sizes() == gate.sizes() && down.dim() == 2 &&
                  gate.size(1) == x.size(1) && down.size(0) == x.size(1) &&
                  down.size(1) == gate.size(0),
              "swiglu: x [T, d], gate and up [F, d], down [d, F] do not fit, got {}, {}, {} and {}",
              fmt::join(x.sizes(), "x"), fmt::join(gate.sizes(), "x"), fmt::join(up.sizes(), "x"),
              fmt::join(down.sizes(), "x"));
    return Swiglu::apply(x, gate, up, down);
}

}  // namespace hybridcp
