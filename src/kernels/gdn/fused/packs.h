// From rows of fp32 to the operands of products (simd_engine.h, amx_engine.h), and transposes.
#pragma once

#include "kernels/gdn/fused/simd_engine.h"

namespace hybridcp::HCP_ISA {

/// Rows of a power of two would lie in the same sets of the first-level cache.
HCP_INLINE int padded_row(int columns) {
    return columns + 16;
}

/// Units of two rows: bf16 pairs, the first row in the low half.
HCP_INLINE VecUint pair_units(Vec first, Vec second) {
#if defined(__AVX512BF16__)
    // Both rows in one conversion, then their halves side by side.
    const __m512i rows = std::bit_cast<__m512i>(
        _mm512_cvtne2ps_pbh(std::bit_cast<__m512>(second), std::bit_cast<__m512>(first)));
    alignas(64) static constexpr std::uint16_t kOrder[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return std::bit_cast<VecUint>(_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), rows));
#else
    const VecUint low = __builtin_convertvector(to_bf16(first), VecUint);
    const VecUint high = __builtin_convertvector(to_bf16(second), VecUint);
    return low | (high << 16);
#endif
}

/// One step of a transpose: swaps the off-diagonal blocks of `kStep` lanes.
template <int kStep>
HCP_INLINE void exchange_lanes(VecUint& a, VecUint& b) {
    VecUint low, high;
    for (int i = 0; i < kLanes; ++i) {
        const bool moved = (i & kStep) != 0;
        low[i] = static_cast<std::uint32_t>(moved ? kLanes + i - kStep : i);
        high[i] = static_cast<std::uint32_t>(moved ? kLanes + i : i + kStep);
    }
    const VecUint first = __builtin_shuffle(a, b, low);
    b = __builtin_shuffle(a, b, high);
    a = first;
}

template <int kStep>
HCP_INLINE void transpose_lanes(VecUint* v) {
    if constexpr (kStep < kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            if ((i & kStep) == 0) {
                exchange_lanes<kStep>(v[i], v[i + kStep]);
            }
        }
        transpose_lanes<kStep * 2>(v);
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
            transpose_lanes<1>(v);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                store_column(c + i, r, v[i]);
            }
        }
    }
}

HCP_INLINE const std::uint32_t* as_units(const void* x) {
    return static_cast<const std::uint32_t*>(x);
}

/// The next kLanes units of fp32 values that lie next to each other.
template <typename Engine>
HCP_INLINE VecUint element_units(const float* x) {
    if constexpr (Engine::kPerUnit == 1) {
        return std::bit_cast<VecUint>(load(x));
    } else {
#if defined(__AVX512BF16__)
        return std::bit_cast<VecUint>(_mm512_cvtne2ps_pbh(std::bit_cast<__m512>(load(x + kLanes)),
                                                          std::bit_cast<__m512>(load(x))));
#else
        Bf16 narrow[2 * kLanes];
        store(narrow, load(x));
        store(narrow + kLanes, load(x + kLanes));
        VecUint units;
        std::memcpy(&units, narrow, sizeof(units));
        return units;
#endif
    }
}

/// Right operand whose depth is the rows of x [rows, columns]: columns in panels of `depth` units.
/// Each row is first scaled by scale[row].
template <typename Engine>
HCP_STAGE void pack_rows_as_depth(const float* x,
                                  int row_stride,
                                  const float* scale,
                                  int rows,
                                  int columns,
                                  std::uint32_t* to,
                                  int panel_stride) {
    constexpr int kPer = Engine::kPerUnit;
    for (int r = 0; r < rows; r += kPer) {
        const Vec first_scale = broadcast(scale[r]), second_scale = broadcast(scale[r + kPer - 1]);
        const float* row = x + r * row_stride;
        for (int c = 0; c < columns; c += kLanes) {
            const Vec first = load(row + c) * first_scale;
            VecUint units;
            if constexpr (kPer == 1) {
                units = std::bit_cast<VecUint>(first);
            } else {
                units = pair_units(first, load(row + row_stride + c) * second_scale);
            }
            store_units(to + (c / kPanel) * panel_stride + r / kPer * kPanel + c % kPanel, units);
        }
    }
}

/// Right operand whose depth is the columns of x [rows, columns] elements: rows in panels.
template <typename Engine>
HCP_STAGE void pack_columns_as_depth(const typename Engine::Element* x,
                                     int row_stride,
                                     int rows,
                                     int columns,
                                     std::uint32_t* to,
                                     int panel_stride) {
    constexpr int kPer = Engine::kPerUnit;
    const std::uint32_t* units = as_units(x);
    transpose_units(
        rows, columns / kPer,
        [&](int r, int c) { return load_units(units + r * (row_stride / kPer) + c); },
        [&](int c, int r, VecUint v) {
            store_units(to + (r / kPanel) * panel_stride + c * kPanel + r % kPanel, v);
        });
}

/// Left operand x^T for x [depth, rows] fp32; its storage is rows * depth elements.
template <typename Engine>
HCP_STAGE void pack_transposed_left(
    const float* x, int row_stride, int depth, int rows, std::uint32_t* to) {
    constexpr int kPer = Engine::kPerUnit;
    if constexpr (Engine::kTiles) {  // rows as they lie, pairs along the depth
        auto* elements = reinterpret_cast<typename Engine::Element*>(to);
        transpose_units(
            depth, rows,
            [&](int d, int r) { return std::bit_cast<VecUint>(load(x + d * row_stride + r)); },
            [&](int r, int d, VecUint v) {
                store(elements + r * depth + d, std::bit_cast<Vec>(v));
            });
    } else {
        for (int d = 0; d < depth; d += kPer) {
            const float* from = x + d * row_stride;
            for (int r = 0; r < rows; r += kLanes) {
                VecUint units;
                if constexpr (kPer == 1) {
                    units = std::bit_cast<VecUint>(load(from + r));
                } else {
                    units = pair_units(load(from + r), load(from + row_stride + r));
                }
                store_units(to + d / kPer * rows + r, units);
            }
        }
    }
}

/// That operand for `rows` and a total depth of `depth` elements.
template <typename Engine>
HCP_INLINE LeftOperand transposed_left(const std::uint32_t* units, int depth, int rows) {
    if constexpr (Engine::kTiles) {
        return {units, depth / Engine::kPerUnit, 1};
    } else {
        return {units, 1, rows};
    }
}

/// Rows of elements as a left operand.
template <typename Engine>
HCP_INLINE LeftOperand rows_left(const typename Engine::Element* x, int row_stride) {
    return {as_units(x), row_stride / Engine::kPerUnit, 1};
}

}  // namespace hybridcp::HCP_ISA
