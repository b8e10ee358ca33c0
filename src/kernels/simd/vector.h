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

/// bf16 bits in the upper half of each lane. The compiler widens vectors of 16-bit integers in two
/// parts, which shows in kernels that do little else.
HCP_INLINE Vec widened(HalfUint bits) {
#if defined(__AVX512BW__)
    const auto wide = std::bit_cast<VecUint>(
        _mm512_maskz_cvtepu16_epi32(kEveryLane, std::bit_cast<__m256i>(bits)));
#elif defined(__AVX2__)
    const auto wide = std::bit_cast<VecUint>(_mm256_cvtepu16_epi32(std::bit_cast<__m128i>(bits)));
#else
    const VecUint wide = __builtin_convertvector(bits, VecUint);
#endif
    return std::bit_cast<Vec>(wide << 16);
}

HCP_INLINE Vec load(const Bf16* x) {
    HalfUint bits;
    std::memcpy(&bits, x, sizeof(bits));
    return widened(bits);
}

/// The lower halves of lanes whose upper halves are 0.
HCP_INLINE HalfUint narrowed(VecUint lanes) {
#if defined(__AVX512BW__)
    return std::bit_cast<HalfUint>(
        _mm512_maskz_cvtepi32_epi16(kEveryLane, std::bit_cast<__m512i>(lanes)));
#elif defined(__AVX2__)
    const auto packed = std::bit_cast<__m256i>(lanes);
    const __m256i halves = _mm256_packus_epi32(packed, packed);
    return std::bit_cast<HalfUint>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08)));
#else
    return __builtin_convertvector(lanes, HalfUint);
#endif
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
    return narrowed(result);
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

}  // namespace hybridcp::HCP_ISA
