// Transposes of units, and units of two rows.
#pragma once

#include <utility>

#include "kernels/gdn/fused/simd_engine.h"

namespace hybridcp::HCP_ISA {

/// Rows of a power of two would lie in the same sets of the first-level cache.
HCP_INLINE int padded_row(int columns) {
    return columns + 16;
}

/// 2 kLanes values next to each other, rounded to bf16 in their order.
HCP_INLINE VecUint narrowed_row(Vec first, Vec second) {
#if defined(__AVX512BF16__)
    return std::bit_cast<VecUint>(
        _mm512_cvtne2ps_pbh(std::bit_cast<__m512>(second), std::bit_cast<__m512>(first)));
#else
    Bf16 narrow[2 * kLanes];
    store(narrow, first);
    store(narrow + kLanes, second);
    VecUint units;
    std::memcpy(&units, narrow, sizeof(units));
    return units;
#endif
}

using VecShort = std::uint16_t __attribute__((vector_size(HCP_VECTOR_BYTES)));

template <int... Lane>
HCP_INLINE void interleave(VecShort first,
                           VecShort second,
                           VecUint* pairs,
                           std::integer_sequence<int, Lane...> /*all*/) {
    constexpr int all = 2 * kLanes;
    pairs[0] = std::bit_cast<VecUint>(
        __builtin_shufflevector(first, second, ((Lane & 1) * all + Lane / 2)...));
    pairs[1] = std::bit_cast<VecUint>(
        __builtin_shufflevector(first, second, ((Lane & 1) * all + kLanes + Lane / 2)...));
}

/// Units of two rows of bf16: pairs, the first row in the low half.
HCP_INLINE void interleave(VecUint first, VecUint second, VecUint* pairs) {
    interleave(std::bit_cast<VecShort>(first), std::bit_cast<VecShort>(second), pairs,
               std::make_integer_sequence<int, 2 * kLanes>());
}

/// The same from fp32 rows of one vector.
HCP_INLINE VecUint pair_units(Vec first, Vec second) {
#if defined(__AVX512BF16__)
    // Both rows in one conversion, then their halves side by side.
    const auto rows = std::bit_cast<VecShort>(narrowed_row(first, second));
    return std::bit_cast<VecUint>(
        __builtin_shufflevector(rows, rows, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
#else
    const VecUint low = __builtin_convertvector(to_bf16(first), VecUint);
    const VecUint high = __builtin_convertvector(to_bf16(second), VecUint);
    return low | (high << 16);
#endif
}

/// The low and the high lanes of each 16 bytes of a and b by turns; T: a vector of the lanes meant.
template <typename T, int... Lane>
HCP_INLINE void zip_lanes(VecUint& a, VecUint& b, std::integer_sequence<int, Lane...> /*all*/) {
    constexpr int lanes = sizeof...(Lane), quarter = lanes * 16 / HCP_VECTOR_BYTES;
    const auto first = std::bit_cast<T>(a), second = std::bit_cast<T>(b);
    a = std::bit_cast<VecUint>(__builtin_shufflevector(
        first, second,
        (Lane / quarter * quarter + Lane % quarter / 2 + (Lane % 2 != 0 ? lanes : 0))...));
    b = std::bit_cast<VecUint>(
        __builtin_shufflevector(first, second,
                                (Lane / quarter * quarter + (Lane % quarter + quarter) / 2 +
                                 (Lane % 2 != 0 ? lanes : 0))...));
}

/// The even, then the odd 16 bytes of a and b.
template <int... Lane>
HCP_INLINE void part_quarters(VecUint& a, VecUint& b, std::integer_sequence<int, Lane...> /*all*/) {
    const VecUint even = __builtin_shufflevector(a, b, (Lane / 4 * 8 + Lane % 4)...);
    b = __builtin_shufflevector(a, b, (Lane / 4 * 8 + Lane % 4 + 4)...);
    a = even;
}

using VecWide = std::uint64_t __attribute__((vector_size(HCP_VECTOR_BYTES)));

/// v[i][j] <-> v[j][i], from shuffles that need no index in a register.
HCP_INLINE void transpose_lanes(VecUint* v) {
    constexpr auto all = std::make_integer_sequence<int, kLanes>();
    constexpr auto half = std::make_integer_sequence<int, kLanes / 2>();
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; i += 4) {
        zip_lanes<VecUint>(v[i], v[i + 1], all);
        zip_lanes<VecUint>(v[i + 2], v[i + 3], all);
        zip_lanes<VecWide>(v[i], v[i + 2], half);
        zip_lanes<VecWide>(v[i + 1], v[i + 3], half);
        std::swap(v[i + 1], v[i + 2]);
    }
    // Each 16 bytes are columns of four rows now.
    if constexpr (kLanes == 8) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            part_quarters(v[i], v[i + 4], all);
        }
    } else if constexpr (kLanes == 16) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            part_quarters(v[i], v[i + 4], all);
            part_quarters(v[i + 8], v[i + 12], all);
            part_quarters(v[i], v[i + 8], all);
            part_quarters(v[i + 4], v[i + 12], all);
        }
    }
}

/// store_column(c, r, v) with v = column c, rows r .. r + kLanes - 1 of a matrix of units whose
/// load_row(r, c) is row r, columns c .. c + kLanes - 1. rows and columns are multiples of kLanes.
template <typename Load, typename Store>
HCP_INLINE void transpose_units(int rows, int columns, Load load_row, Store store_column) {
    for (int r = 0; r < rows; r += kLanes) {
        for (int c = 0; c < columns; c += kLanes) {
            VecUint v[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                v[i] = load_row(r + i, c);
            }
            transpose_lanes(v);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                store_column(c + i, r, v[i]);
            }
        }
    }
}

}  // namespace hybridcp::HCP_ISA
