// Vectors of bf16 in memory, fp32 in registers.
#pragma once

#include "kernels/simd/vector.h"

namespace hybridcp::HCP_ISA {

struct Bf16 {
    std::uint16_t bits;
};

/// bf16 bits in the upper half of each lane. The compiler widens vectors of 16-bit integers in two
/// parts, which shows in kernels that do little else.
HCP_INLINE Vec widened(HalfUint bits) {
#if defined(__AVX512BW__)
    const auto wide = std::bit_cast<VecUint>(
        _mm512_maskz_cvtepu16_epi32(kEveryLane, std::bit_cast<__m256i>(bits)));
#elif HCP_VECTOR_IS_AVX2
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
#elif HCP_VECTOR_IS_AVX2
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

/// As the stream() of floats.
HCP_INLINE void stream(Bf16* x, Vec v) {
#if defined(__AVX512F__)
    if (reinterpret_cast<std::uintptr_t>(x) % sizeof(HalfUint) == 0) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(x), std::bit_cast<__m256i>(to_bf16(v)));
        return;
    }
#endif
    store(x, v);
}

HCP_INLINE float to_float(Bf16 x) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

HCP_INLINE void from_float(Bf16* to, float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = static_cast<std::uint16_t>(x == x ? rounded : ((bits >> 16) | 0x40));
}

}  // namespace hybridcp::HCP_ISA
