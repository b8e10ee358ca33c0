// The exponential of vectors.
#pragma once

#include "kernels/simd/vector.h"

namespace hybridcp::HCP_ISA {

/// x inside [low, high]; NaN stays NaN.
HCP_INLINE Vec clamped(Vec x, float low, float high) {
#if defined(__AVX512F__)
    const auto raised =
        _mm512_maskz_max_ps(kEveryLane, _mm512_set1_ps(low), std::bit_cast<__m512>(x));
    return std::bit_cast<Vec>(_mm512_maskz_min_ps(kEveryLane, _mm512_set1_ps(high), raised));
#elif HCP_VECTOR_IS_AVX2
    const auto raised = _mm256_max_ps(_mm256_set1_ps(low), std::bit_cast<__m256>(x));
    return std::bit_cast<Vec>(_mm256_min_ps(_mm256_set1_ps(high), raised));
#else
    const Vec raised = low > x ? broadcast(low) : x;
    return high < raised ? broadcast(high) : raised;
#endif
}

/// e^x to 2 ulp for x in [-87.3, 87]; 0 below, e^87 above, NaN for NaN. Short, since it is
/// most of what the pointwise kernels compute.
HCP_INLINE Vec bounded_exp(Vec x) {
    // x = n ln 2 + r; 2^n is assembled from the low bits of n + 127 + 1.5 * 2^23, 0 for n = -127.
    const Vec bounded = clamped(x, -88.02F, 87.0F);
    const Vec shifted = bounded * 1.44269504F + 12583039.0F;
    const Vec n = shifted - 12583039.0F;
    const Vec r = bounded - n * 0.693147182F;
    // The polynomial of least relative error on |r| <= ln 2 / 2 that starts with 1 + r.
    Vec p = broadcast(0.00138145604F);
    p = p * r + 0.00836873800F;
    p = p * r + 0.0416683890F;
    p = p * r + 0.166665211F;
    p = p * r + 0.49999994F;
    p = p * r + 1.0F;
    p = p * r + 1.0F;
    return p * std::bit_cast<Vec>(std::bit_cast<VecUint>(shifted) << 23);
}

}  // namespace hybridcp::HCP_ISA
