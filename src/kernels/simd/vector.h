// Vectors of fp32 for the fused CPU kernels, on the compiler's vector extension, so that one source
// serves every instruction set. A file that includes this is compiled with HCP_ISA (the name of its
// inline namespace: no symbol of one instruction set can stand in for another's) and
// HCP_VECTOR_BYTES. Such files include no standard containers and no torch header: their inline
// functions would be emitted with instructions that other CPUs lack, under names that all share.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#if !defined(HCP_ISA) || !defined(HCP_VECTOR_BYTES)
#error "kernels/simd/vector.h is for files listed in hcp_isa_sources"
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif

/// Whether a vector is a register of AVX2 (and not of AVX-512 or of an emulation).
#if defined(__AVX2__) && HCP_VECTOR_BYTES == 32
#define HCP_VECTOR_IS_AVX2 1
#else
#define HCP_VECTOR_IS_AVX2 0
#endif

#define HCP_INLINE inline __attribute__((always_inline))
/// A stage of a kernel, kept apart so that the registers are its own loops'.
#define HCP_STAGE [[maybe_unused]] static __attribute__((noinline))

namespace hybridcp::HCP_ISA {

/// Lanes of a vector.
inline constexpr int kLanes = HCP_VECTOR_BYTES / 4;

using Vec = float __attribute__((vector_size(HCP_VECTOR_BYTES)));
using VecInt = std::int32_t __attribute__((vector_size(HCP_VECTOR_BYTES)));
using VecUint = std::uint32_t __attribute__((vector_size(HCP_VECTOR_BYTES)));
using HalfUint = std::uint16_t __attribute__((vector_size(HCP_VECTOR_BYTES / 2)));

#if defined(__AVX512F__)
// GCC 12 warns that the intrinsics without a mask use an uninitialised value.
inline constexpr __mmask16 kEveryLane = 0xffff;
#endif

HCP_INLINE Vec load(const float* x) {
    Vec v;
    std::memcpy(&v, x, sizeof(v));
    return v;
}

HCP_INLINE void store(float* x, Vec v) {
    std::memcpy(x, &v, sizeof(v));
}

/// Past the caches, where x allows it: for what is not read again soon. A fence comes before other
/// threads read it.
HCP_INLINE void stream(float* x, Vec v) {
#if defined(__AVX512F__)
    if (reinterpret_cast<std::uintptr_t>(x) % sizeof(v) == 0) {
        _mm512_stream_ps(x, std::bit_cast<__m512>(v));
        return;
    }
#endif
    store(x, v);
}

// A scalar operand is spread over the lanes; subtracting zero changes no bit and costs nothing.
HCP_INLINE Vec broadcast(float x) {
    return x - Vec{};
}

HCP_INLINE VecInt broadcast_int(std::int32_t x) {
    return x - VecInt{};
}

/// The compiler takes roots lane by lane.
HCP_INLINE Vec square_root(Vec v) {
#if defined(__AVX512F__)
    return std::bit_cast<Vec>(_mm512_maskz_sqrt_ps(kEveryLane, std::bit_cast<__m512>(v)));
#elif HCP_VECTOR_IS_AVX2
    return std::bit_cast<Vec>(_mm256_sqrt_ps(std::bit_cast<__m256>(v)));
#else
    for (int i = 0; i < kLanes; ++i) {
        v[i] = __builtin_sqrtf(v[i]);
    }
    return v;
#endif
}

HCP_INLINE Vec maximum(Vec a, Vec b) {
    return a > b ? a : b;
}

/// yes where mask is all ones, no where it is 0.
HCP_INLINE Vec select(VecInt mask, Vec yes, Vec no) {
    return mask ? yes : no;
}

HCP_INLINE float to_float(float x) {
    return x;
}

HCP_INLINE void from_float(float* to, float x) {
    *to = x;
}

/// The first `count` < kLanes elements; zeros behind them.
template <typename T>
HCP_INLINE Vec load_part(const T* x, int count) {
    T padded[kLanes] = {};
    std::memcpy(padded, x, sizeof(T) * static_cast<std::size_t>(count));
    return load(padded);
}

template <typename T>
HCP_INLINE void store_part(T* x, Vec v, int count) {
    T padded[kLanes];
    store(padded, v);
    std::memcpy(x, padded, sizeof(T) * static_cast<std::size_t>(count));
}

/// Sum of the lanes, always in the same order.
HCP_INLINE float sum_lanes(Vec v) {
    using Quad = float __attribute__((vector_size(16)));
    Quad quads[kLanes / 4];
    std::memcpy(quads, &v, sizeof(v));
    for (int width = kLanes / 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) {
            quads[i] += quads[i + width];
        }
    }
    return (quads[0][0] + quads[0][2]) + (quads[0][1] + quads[0][3]);
}

HCP_INLINE float max_lanes(Vec v) {
    float lanes[kLanes];
    store(lanes, v);
    float largest = lanes[0];
    for (int i = 1; i < kLanes; ++i) {
        largest = lanes[i] > largest ? lanes[i] : largest;
    }
    return largest;
}

}  // namespace hybridcp::HCP_ISA
