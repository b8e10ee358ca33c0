// Loops over rows in vectors, for the fused pointwise kernels. The last, incomplete vector of a row
// runs the same instructions as the others, so that an element's bits do not depend on its place.
#pragma once

#include "kernels/pointwise/arguments.h"
#include "kernels/simd/bf16.h"

namespace hybridcp::HCP_ISA {

struct AllLanes {};
struct SomeLanes {
    int count;
};

HCP_INLINE Vec load(const float* x, AllLanes /*lanes*/) {
    return load(x);
}

HCP_INLINE Vec load(const Bf16* x, AllLanes /*lanes*/) {
    return load(x);
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
