// Vectors of doubles, as many as lanes of fp32: sums that must not lose what cancels.
#pragma once

#include <utility>

#include "kernels/simd/vector.h"

namespace hybridcp::HCP_ISA {

using Double = double __attribute__((vector_size(HCP_VECTOR_BYTES)));
/// As many doubles as lanes: the compiler keeps vectors wider than registers in memory.
struct VecDouble {
    Double low, high;

    HCP_INLINE VecDouble& operator+=(const VecDouble& other) {
        low += other.low;
        high += other.high;
        return *this;
    }
    friend HCP_INLINE VecDouble operator-(double x, const VecDouble& v) {
        return {.low = x - v.low, .high = x - v.high};
    }
    friend HCP_INLINE VecDouble operator-(const VecDouble& v, double x) {
        return {.low = v.low - x, .high = v.high - x};
    }
};

HCP_INLINE double sum_lanes(const VecDouble& v) {
    const Double sums = v.low + v.high;
    double lanes[kLanes / 2];
    std::memcpy(lanes, &sums, sizeof(sums));
    for (int width = kLanes / 4; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) {
            lanes[i] += lanes[i + width];
        }
    }
    return lanes[0];
}

HCP_INLINE VecDouble load(const double* x) {
    VecDouble v;
    std::memcpy(&v.low, x, sizeof(v.low));
    std::memcpy(&v.high, x + kLanes / 2, sizeof(v.high));
    return v;
}

HCP_INLINE void store(double* x, const VecDouble& v) {
    std::memcpy(x, &v.low, sizeof(v.low));
    std::memcpy(x + kLanes / 2, &v.high, sizeof(v.high));
}

using HalfVec = float __attribute__((vector_size(HCP_VECTOR_BYTES / 2)));

// The compiler converts wide vectors lane by lane.
HCP_INLINE Double widened(HalfVec v) {
#if defined(__AVX512F__)
    return std::bit_cast<Double>(_mm512_maskz_cvtps_pd(0xff, std::bit_cast<__m256>(v)));
#else
    return __builtin_convertvector(v, Double);
#endif
}

HCP_INLINE HalfVec narrowed(Double v) {
#if defined(__AVX512F__)
    return std::bit_cast<HalfVec>(_mm512_maskz_cvtpd_ps(0xff, std::bit_cast<__m512d>(v)));
#else
    return __builtin_convertvector(v, HalfVec);
#endif
}

template <int... Lane>
HCP_INLINE VecDouble widened(Vec v, std::integer_sequence<int, Lane...> /*half*/) {
    return {.low = widened(__builtin_shufflevector(v, v, Lane...)),
            .high = widened(__builtin_shufflevector(v, v, (Lane + kLanes / 2)...))};
}
HCP_INLINE VecDouble widened(Vec v) {
    return widened(v, std::make_integer_sequence<int, kLanes / 2>());
}

template <int... Lane>
HCP_INLINE Vec narrowed(const VecDouble& v, std::integer_sequence<int, Lane...> /*all*/) {
    return __builtin_shufflevector(narrowed(v.low), narrowed(v.high), Lane...);
}
HCP_INLINE Vec narrowed(const VecDouble& v) {
    return narrowed(v, std::make_integer_sequence<int, kLanes>());
}

}  // namespace hybridcp::HCP_ISA
