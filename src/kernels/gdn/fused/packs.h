// From rows of fp32 to the operands of products (simd_engine.h, tile_engine.h), and transposes.
#pragma once

#include "kernels/gdn/fused/transpose.h"

namespace hybridcp::HCP_ISA {

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
    constexpr int per_unit = Engine::kPerUnit;
    for (int r = 0; r < rows; r += per_unit) {
        const Vec first_scale = broadcast(scale[r]),
                  second_scale = broadcast(scale[r + per_unit - 1]);
        const float* row = x + r * row_stride;
        for (int c = 0; c < columns; c += kLanes) {
            const Vec first = load(row + c) * first_scale;
            VecUint units;
            if constexpr (per_unit == 1) {
                units = std::bit_cast<VecUint>(first);
            } else {
                units = pair_units(first, load(row + row_stride + c) * second_scale);
            }
            store_units(to + (c / kPanel) * panel_stride + r / per_unit * kPanel + c % kPanel,
                        units);
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
    constexpr int per_unit = Engine::kPerUnit;
    const std::uint32_t* units = as_units(x);
    transpose_units(
        rows, columns / per_unit,
        [&](int r, int c) { return load_units(units + r * (row_stride / per_unit) + c); },
        [&](int c, int r, VecUint v) {
            store_units(to + (r / kPanel) * panel_stride + c * kPanel + r % kPanel, v);
        });
}

/// Left operand x^T for x [depth, rows] fp32; its storage is rows * depth elements.
template <typename Engine>
HCP_STAGE void pack_transposed_left(
    const float* x, int row_stride, int depth, int rows, std::uint32_t* to) {
    constexpr int per_unit = Engine::kPerUnit;
    if constexpr (Engine::kTiles) {  // rows as they lie, pairs along the depth
        auto* elements = reinterpret_cast<typename Engine::Element*>(to);
        transpose_units(
            depth, rows,
            [&](int d, int r) { return std::bit_cast<VecUint>(load(x + d * row_stride + r)); },
            [&](int r, int d, VecUint v) {
                store(elements + r * depth + d, std::bit_cast<Vec>(v));
            });
    } else {
        for (int d = 0; d < depth; d += per_unit) {
            const float* from = x + d * row_stride;
            for (int r = 0; r < rows; r += kLanes) {
                VecUint units;
                if constexpr (per_unit == 1) {
                    units = std::bit_cast<VecUint>(load(from + r));
                } else {
                    units = pair_units(load(from + r), load(from + row_stride + r));
                }
                store_units(to + d / per_unit * rows + r, units);
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
