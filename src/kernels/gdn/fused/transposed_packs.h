// Left operands that are the transpose of what lies row by row.
#pragma once

#include "kernels/gdn/fused/packs.h"

namespace hybridcp::HCP_ISA {

/// Units from row to row of a transposed left operand of tiles: whole lines, not a power of two.
HCP_INLINE int transposed_row(int units) {
    return units + 16;
}
/// Units that a transposed left operand takes.
template <typename Engine>
HCP_INLINE int transposed_left_units(int depth, int rows) {
    const int units = depth / Engine::kPerUnit;
    return rows * (Engine::kTiles ? transposed_row(units) : units);
}

/// Left operand x^T for x [depth, rows] fp32.
template <typename Engine>
HCP_STAGE void pack_transposed_left(
    const float* x, int row_stride, int depth, int rows, std::uint32_t* to) {
    constexpr int per_unit = Engine::kPerUnit;
    if constexpr (Engine::kTiles) {  // rows as they lie, pairs along the depth
        const int row = transposed_row(depth / per_unit);
        transpose_units(
            depth / per_unit, rows,
            [&](int u, int r) {
                const float* from = x + u * per_unit * row_stride + r;
                return pair_units(load(from), load(from + row_stride));
            },
            [&](int r, int u, VecUint v) { store_units(to + r * row + u, v); });
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
        const int row = transposed_row(depth / Engine::kPerUnit);
        return {.units = units, .row_stride = row, .unit_stride = 1, .panel_stride = kPanel * row};
    } else {
        return {.units = units, .row_stride = 1, .unit_stride = rows, .panel_stride = kPanel};
    }
}

/// The transpose of a right operand as a left operand [rows, depth]. Tiles need a copy.
template <typename Engine>
HCP_INLINE LeftOperand left_of_right(RightOperand from, int depth, int rows, std::uint32_t* copy) {
    if constexpr (Engine::kTiles) {
        const int units = depth / Engine::kPerUnit;
        transpose_units(
            units, rows,
            [&](int u, int r) {
                return load_units(from.units + (r / kPanel) * from.panel_stride + u * kPanel +
                                  r % kPanel);
            },
            [&](int r, int u, VecUint v) { store_units(copy + r * transposed_row(units) + u, v); });
        return transposed_left<Engine>(copy, depth, rows);
    } else {
        return {.units = from.units,
                .row_stride = 1,
                .unit_stride = kPanel,
                .panel_stride = from.panel_stride};
    }
}

}  // namespace hybridcp::HCP_ISA
