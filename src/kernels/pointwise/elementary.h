// The elementary functions of the fused pointwise kernels.
#pragma once

#include "kernels/pointwise/lanes.h"
#include "kernels/simd/exponential.h"

namespace hybridcp::HCP_ISA {

/// a * b, rounded, for a sum with another product. Of two plain ones the compiler would choose
/// which to round before the addition, and does choose differently for full and incomplete vectors
/// (g++ 13), so it must not know that this is one.
HCP_INLINE Vec product(Vec a, Vec b) {
    Vec rounded = a * b;
#ifdef __x86_64__
    asm("" : "+v"(rounded));
#endif
    return rounded;
}

HCP_INLINE Vec logistic(Vec x) {
    return 1.0F / (1.0F + bounded_exp(-x));
}

HCP_INLINE Vec silu(Vec x) {
    return x * logistic(x);
}

/// The derivative of silu at x, for s = logistic(x).
HCP_INLINE Vec silu_slope(Vec x, Vec s) {
    return s * (1.0F + x * (1.0F - s));
}

}  // namespace hybridcp::HCP_ISA
