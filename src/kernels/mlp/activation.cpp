#include "kernels/mlp/activation.h"

#include "kernels/mlp/activation_kernels.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/simd/dispatch.h"

namespace hybridcp {

HCP_DECLARE_KERNELS(ActivationKernels, activation_kernels)

namespace {

ActivationInputs inputs_of(const at::Tensor& gate, const at::Tensor& up) {
    return {.element = element_of(gate),
            .width = gate.size(1),
            .gate = read_rows(gate),
            .up = read_rows(up)};
}

template <typename Body>
void for_each_rows(const at::Tensor& gate, const Body& body) {
    for_each_block(gate.size(0), rows_of_task(gate.size(1), 1),
                   [&](Range rows, std::int64_t /*block*/, int /*thread*/) { body(rows); });
}

}  // namespace

at::Tensor swiglu_activation(const at::Tensor& gate, const at::Tensor& up) {
    if (!takes_fused({gate, up})) {
        return at::silu(gate).mul_(up);
    }
    const at::Tensor gate_rows = as_rows(gate), up_rows = as_rows(up);
    at::Tensor activated = at::empty(gate.sizes(), gate.options());
    const ActivationInputs inputs = inputs_of(gate_rows, up_rows);
    const Rows out = write_rows(activated);
    const ActivationKernels& kernels = activation_kernels(selected_isa());
    for_each_rows(gate, [&](Range rows) { kernels.forward(inputs, out, rows); });
    return activated;
}

SwigluGradients swiglu_activation_backward(at::Tensor d_activated,
                                           const at::Tensor& gate,
                                           const at::Tensor& up,
                                           bool with_activated) {
    SwigluGradients result;
    if (!takes_fused({gate, up, d_activated})) {
        const at::Tensor opened = at::silu(gate);
        result.activated = with_activated ? opened * up : at::Tensor();
        result.d_gate = at::silu_backward(d_activated * up, gate);
        result.d_up = d_activated * opened;
        return result;
    }
    const at::Tensor gate_rows = as_rows(gate), up_rows = as_rows(up);
    const at::Tensor d_rows = as_rows(d_activated);
    result.d_up = d_rows.is_contiguous() ? d_rows : at::empty(gate.sizes(), gate.options());
    result.d_gate = at::empty(gate.sizes(), gate.options());
    if (with_activated) {
        result.activated = at::empty(gate.sizes(), gate.options());
    }
    const ActivationInputs inputs = inputs_of(gate_rows, up_rows);
    const ActivationGradients gradients{
        .d_activated = read_rows(d_rows),
        .activated = with_activated ? write_rows(result.activated) : Rows{},
        .d_gate = write_rows(result.d_gate),
        .d_up = write_rows(result.d_up)};
    const ActivationKernels& kernels = activation_kernels(selected_isa());
    for_each_rows(gate, [&](Range rows) { kernels.backward(inputs, gradients, rows); });
    return result;
}

}  // namespace hybridcp
