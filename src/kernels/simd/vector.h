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

#if defined(__AVX512BF16__)
#include <immintrin.h>
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

struct Bf16 {
    std::uint16_t bits;
};

HCP_INLINE Vec load(const float* x) {
    Vec v;
    std::memcpy(&v, x, sizeof(v));
    return v;
}

HCP_INLINE void store(float* x, Vec v) {
    std::memcpy(x, &v, sizeof(v));
}

// A scalar operand is spread over the lanes; subtracting zero changes no bit and costs nothing.
HCP_INLINE Vec broadcast(float x) {
    return x - Vec{};
}

HCP_INLINE VecInt broadcast_int(std::int32_t x) {
    return x - VecInt{};
}

/// yes where mask is all ones, no where it is 0.
HCP_INLINE Vec select(VecInt mask, Vec yes, Vec no) {
    return mask ? yes : no;
}

HCP_INLINE Vec minimum(Vec a, Vec b) {
    return a < b ? a : b;
}

HCP_INLINE Vec maximum(Vec a, Vec b) {
    return a > b ? a : b;
}

HCP_INLINE Vec load(const Bf16* x) {
    HalfUint narrow;
    std::memcpy(&narrow, x, sizeof(narrow));
    return std::bit_cast<Vec>(__builtin_convertvector(narrow, VecUint) << 16);
}

/// Rounds to nearest, ties to even; NaN stays NaN.
HCP_INLINE HalfUint to_bf16(Vec v) {
#if defined(__AVX512BF16__)
    return std::bit_cast<HalfUint>(_mm512_cvtneps_pbh(std::bit_cast<__m512>(v)));
#else
    const auto bits = std::bit_cast<VecUint>(v);
    const VecUint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const VecUint quiet = (bits >> 16) | 0x40;
    const VecUint result = v == v ? rounded : quiet;
    return __builtin_convertvector(result, HalfUint);
#endif
}

HCP_INLINE void store(Bf16* x, Vec v) {
    const HalfUint narrow = to_bf16(v);
    std::memcpy(x, &narrow, sizeof(narrow));
}

HCP_INLINE float to_float(float x) {
    return x;
}

HCP_INLINE float to_float(Bf16 x) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

HCP_INLINE void from_float(float* to, float x) {
    *to = x;
}

HCP_INLINE void from_float(Bf16* to, float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = static_cast<std::uint16_t>(x == x ? rounded : ((bits >> 16) | 0x40));
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

/// e^x to 1 ulp or so; 0 below -87.3 (no denormals), infinite above 88.7, NaN for NaN.
HCP_INLINE Vec exp(Vec x) {
    // x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7.
    const Vec low = broadcast(-87.33654F), high = broadcast(88.72283F);
    const Vec clamped = minimum(maximum(x, low), high);
    const Vec magic = broadcast(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec shifted = clamped * 1.44269504F + magic;
    const Vec n = shifted - magic;
    const Vec r = (clamped - n * 0.693359375F) - n * -2.12194440e-4F;
    Vec p = broadcast(1.0F / 5040);
    p = p * r + 1.0F / 720;
    p = p * r + 1.0F / 120;
    p = p * r + 1.0F / 24;
    p = p * r + 1.0F / 6;
    p = p * r + 0.5F;
    p = p * r + 1.0F;
    p = p * r + 1.0F;
    // Two factors, since 2^128 is no float.
    const VecInt exponent = std::bit_cast<VecInt>(shifted) - std::bit_cast<VecInt>(magic);
    const VecInt half = exponent >> 1;
    const auto power = [](VecInt e) { return std::bit_cast<Vec>((e + 127) << 23); };
    Vec result = p * power(half) * power(exponent - half);
    result = select(x < low, Vec{}, result);
    result = select(x > high, broadcast(__builtin_inff()), result);
    return select(x == x, result, x);
}

HCP_INLINE Vec sigmoid(Vec x) {
    return 1.0F / (1.0F + exp(-x));
}

}  // namespace hybridcp::HCP_ISA
