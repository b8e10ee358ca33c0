// SwiGLU's activation silu(gate) * up, a range of rows at a time, in one pass over memory. Rounds
// silu(gate) and each product to the tensors' dtype, as ATen's operators do.
#pragma once

#include "kernels/pointwise/arguments.h"

namespace hybridcp {

struct ActivationInputs {
    Element element;
    std::int64_t width;  // F
    ConstRows gate;      // [N, F]
    ConstRows up;        // [N, F]
};

struct ActivationGradients {
    ConstRows d_activated;  // [N, F]
    Rows activated;         // [N, F] silu(gate) * up once more, for the next weight; may be null
    Rows d_gate;            // [N, F]
    Rows d_up;              // [N, F], may be d_activated
};

struct ActivationKernels {
    void (*forward)(const ActivationInputs& inputs, const Rows& activated, Range rows);
    void (*backward)(const ActivationInputs& inputs,
                     const ActivationGradients& gradients,
                     Range rows);
};

}  // namespace hybridcp
