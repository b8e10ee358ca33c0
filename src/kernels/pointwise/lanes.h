// Loops over rows in vectors, for the fused pointwise kernels. The last, incomplete vector of a row
// runs the same instructions as the others, so that an element's bits do not depend on its place.
#pragma once

#include "kernels/pointwise/arguments.h"
#include "kernels/simd/vector.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hybridcp::HCP_ISA {

#if defined(__AVX512F__)
// GCC 12 warns that the intrinsics without a mask use an uninitialised value.
inline constexpr __mmask16 kEveryLane = 0xffff;
#endif

struct AllLanes {};
struct SomeLanes {
    int count;
};

HCP_INLINE Vec load(const float* x, AllLanes /*lanes*/) {
    return load(x);
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

HCP_INLINE Vec load(const Bf16* x, AllLanes /*lanes*/) {
    HalfUint bits;
    std::memcpy(&bits, x, sizeof(bits));
    return widened(bits);
}

template <typename T>
HCP_INLINE Vec load(const T* x, SomeLanes lanes) {
    return load_part(x, lanes.count);
}

template <typename T>
HCP_INLINE void store(T* x, Vec v, AllLanes /*lanes*/) {
    store(x, v);
}

template <typename T>
HCP_INLINE void store(T* x, Vec v, SomeLanes lanes) {
    store_part(x, v, lanes.count);
}

/// body(first element, its lanes) for each vector of a row.
template <typename Body>
HCP_INLINE void for_each_vector(std::int64_t count, const Body& body) {
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        body(i, AllLanes{});
    }
    if (i < count) {
        body(i, SomeLanes{static_cast<int>(count - i)});
    }
}

template <typename T>
HCP_INLINE const T* row_of(const ConstRows& rows, std::int64_t row) {
    return static_cast<const T*>(rows.data) + row * rows.stride;
}

template <typename T>
HCP_INLINE T* row_of(const Rows& rows, std::int64_t row) {
    return static_cast<T*>(rows.data) + row * rows.stride;
}

/// Calls body with a value of the type that `element` names.
template <typename Body>
HCP_INLINE void with_element(Element element, const Body& body) {
    if (element == Element::kBf16) {
        body(Bf16{});
    } else {
        body(float{});
    }
}

/// What is left of v after it was stored as a T.
template <typename T>
HCP_INLINE Vec rounded_to(Vec v) {
    if constexpr (sizeof(T) == sizeof(float)) {
        return v;
    } else {
#if defined(__AVX512BF16__)
        return widened(to_bf16(v));
#else
        const auto bits = std::bit_cast<VecUint>(v);
        const VecUint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
        return v == v ? std::bit_cast<Vec>(rounded) : v;
#endif
    }
}

}  // namespace hybridcp::HCP_ISA
