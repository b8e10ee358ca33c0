// The two RMS norms, a range of rows at a time, one pass over memory each way: what a row needs
// twice is read from the cache the second time. The maths is in rms_norm.h.
#pragma once

#include "kernels/pointwise/arguments.h"

namespace hybridcp {

struct NormInputs {
    Element element;
    std::int64_t width;   // D
    float eps;            // forward
    ConstRows x;          // [N, D]
    ConstRows z;          // [N, D], of the gated norm
    const float* weight;  // [D]; the zero-centred norm's is 1 + weight
    float* inverse;       // [N], rsqrt(mean(x^2) + eps): written by forward, read by backward
};

struct NormGradients {
    ConstRows dy;               // [N, D]
    Rows dx;                    // [N, D]
    Rows dz = {};               // [N, D], of the gated norm
    float* d_weight = nullptr;  // [D], of this range of rows alone
    float* scratch = nullptr;   // [D], of this thread; the gated norm's
};

struct NormKernels {
    void (*zero_centered)(const NormInputs& inputs, const Rows& y, Range rows);
    void (*zero_centered_backward)(const NormInputs& inputs,
                                   const NormGradients& gradients,
                                   Range rows);
    void (*gated)(const NormInputs& inputs, const Rows& y, Range rows);
    void (*gated_backward)(const NormInputs& inputs, const NormGradients& gradients, Range rows);
};

}  // namespace hybridcp
