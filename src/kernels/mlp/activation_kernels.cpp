#include "kernels/mlp/activation_kernels.h"

#include "kernels/pointwise/elementary.h"

namespace hybridcp::HCP_ISA {
namespace {

void forward(const ActivationInputs& inputs, const Rows& activated, Range rows) {
    with_element(inputs.element, [&]<typename T>(T /*element*/) {
        for (std::int64_t row = rows.begin; row < rows.end; ++row) {
            const T *gate = row_of<T>(inputs.gate, row), *up = row_of<T>(inputs.up, row);
            T* out = row_of<T>(activated, row);
            for_each_vector(inputs.width, [&](std::int64_t i, auto lanes) {
                const Vec opened = rounded_to<T>(silu(load(gate + i, lanes)));
                store(out + i, opened * load(up + i, lanes), lanes);
            });
        }
    });
}

template <typename T, bool WithActivated>
HCP_INLINE void backward_row(const ActivationInputs& inputs,
                             const ActivationGradients& gradients,
                             std::int64_t row) {
    const T *gate = row_of<T>(inputs.gate, row), *up = row_of<T>(inputs.up, row);
    const T* d_activated = row_of<T>(gradients.d_activated, row);
    T *d_gate = row_of<T>(gradients.d_gate, row), *d_up = row_of<T>(gradients.d_up, row);
    T* activated = WithActivated ? row_of<T>(gradients.activated, row) : nullptr;
    for_each_vector(inputs.width, [&](std::int64_t i, auto lanes) {
        const Vec x = load(gate + i, lanes), u = load(up + i, lanes);
        const Vec d = load(d_activated + i, lanes), s = logistic(x);
        const Vec opened = rounded_to<T>(x * s);
        if constexpr (WithActivated) {
            store(activated + i, opened * u, lanes);
        }
        store(d_gate + i, rounded_to<T>(d * u) * silu_slope(x, s), lanes);
        store(d_up + i, d * opened, lanes);
    });
}

void backward(const ActivationInputs& inputs, const ActivationGradients& gradients, Range rows) {
    with_element(inputs.element, [&]<typename T>(T /*element*/) {
        for (std::int64_t row = rows.begin; row < rows.end; ++row) {
            if (gradients.activated.data != nullptr) {
                backward_row<T, true>(inputs, gradients, row);
            } else {
                backward_row<T, false>(inputs, gradients, row);
            }
        }
    });
}

constexpr ActivationKernels kActivationKernels{.forward = forward, .backward = backward};

}  // namespace

const ActivationKernels& activation_kernels() {
    return kActivationKernels;
}

}  // namespace hybridcp::HCP_ISA
