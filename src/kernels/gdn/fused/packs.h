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
        return narrowed_row(load(x), load(x + kLanes));
    }
}

/// Where the units of row r, column c lie in a right operand whose depth is the rows; r: the first
/// of a unit.
template <typename Engine>
HCP_INLINE std::uint32_t* unit_of_row(std::uint32_t* units,
                                      std::int64_t panel_stride,
                                      std::int64_t r,
                                      std::int64_t c) {
    return units + (c / kPanel) * panel_stride + r * (kPanel / Engine::kPerUnit) + c % kPanel;
}

/// Two rows of two vectors there; `to` is that of the first row.
template <typename Engine>
HCP_INLINE void store_row_pair(std::uint32_t* to, const Vec* first, const Vec* second) {
    if constexpr (Engine::kPerUnit == 1) {
        for (int n = 0; n < 2; ++n) {
            store_units(to + n * kLanes, std::bit_cast<VecUint>(first[n]));
            store_units(to + kPanel + n * kLanes, std::bit_cast<VecUint>(second[n]));
        }
    } else {
        VecUint pairs[2];
        interleave(narrowed_row(first[0], first[1]), narrowed_row(second[0], second[1]), pairs);
        store_units(to, pairs[0]);
        store_units(to + kLanes, pairs[1]);
    }
}

/// Two vectors of a row as elements.
template <typename Engine>
HCP_INLINE void store_elements(typename Engine::Element* to, const Vec* row) {
    if constexpr (Engine::kPerUnit == 1) {
        store(to, row[0]);
        store(to + kLanes, row[1]);
    } else {
        const VecUint units = narrowed_row(row[0], row[1]);
        std::memcpy(to, &units, sizeof(units));
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

/// Rows of elements as a left operand.
template <typename Engine>
HCP_INLINE LeftOperand rows_left(const typename Engine::Element* x, int row_stride) {
    const int row = row_stride / Engine::kPerUnit;
    return {
        .units = as_units(x), .row_stride = row, .unit_stride = 1, .panel_stride = kPanel * row};
}

}  // namespace hybridcp::HCP_ISA
