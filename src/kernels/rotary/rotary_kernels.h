// Partial rotary embedding in one pass over memory. The maths is in rotary.h.
#pragma once

#include "kernels/pointwise/arguments.h"

namespace hybridcp {

struct RotaryArguments {
    Element element;
    std::int64_t heads;
    std::int64_t head_dim;      // D
    std::int64_t half;          // r / 2
    const void* x;              // [T, H, D], elements of a head side by side
    std::int64_t token_stride;  // of x
    std::int64_t head_stride;   // of x
    ConstRows cos;              // [T, r/2] fp32
    ConstRows sin;
    float sign;  // 1, or -1 for the transpose
    void* y;     // [T, H, D] contiguous
};

struct RotaryKernels {
    void (*rotate)(const RotaryArguments& arguments, Range tokens);
};

}  // namespace hybridcp
