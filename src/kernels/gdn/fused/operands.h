// The operands of small matrix products, as units of 32 bits along the depth: one fp32, or a pair
// of bf16.
#pragma once

#include "kernels/gdn/fused/rows_ahead.h"
#include "kernels/simd/bf16.h"

namespace hybridcp::HCP_ISA {

/// Columns of a panel: right operands and states are stored as [columns / 32][rows][32], since rows
/// that lie a power of two apart would share a few sets of the first-level cache.
inline constexpr int kPanel = 32;

/// Unit u of row i at units[(i / 32) * panel_stride + (i % 32) * row_stride + u * unit_stride]:
/// rows as they lie (unit_stride 1), or a transposed operand read from token-major units
/// (row_stride 1).
struct LeftOperand {
    const std::uint32_t* units;
    int row_stride;
    int unit_stride;
    int panel_stride;

    [[nodiscard]] HCP_INLINE const std::uint32_t* row(int i) const {
        return units + (i / kPanel) * panel_stride + (i % kPanel) * row_stride;
    }
};

/// Unit u of column j at units[(j / 32) * panel_stride + u * 32 + j % 32].
struct RightOperand {
    const std::uint32_t* units;
    int panel_stride;

    /// The panel of columns j and what follows.
    [[nodiscard]] HCP_INLINE RightOperand panel_at(int j) const {
        return {units + static_cast<std::int64_t>(j / kPanel) * panel_stride, panel_stride};
    }
};

/// left right, of [rows, columns]. rows: a multiple of the engine's kRowMultiple; columns: of 32.
struct Product {
    LeftOperand left;
    RightOperand right;
    int rows, columns;
    RowsAhead& ahead;  // asked for meanwhile
    /// Where not 0: of row i, columns behind i % triangle are not needed and may be left out.
    int triangle = 0;
};

/// A row or column of a result, for epilogues. Those whose addresses matter take it as wide as a
/// pointer: what a block adds to it then folds into the addresses. To the others it is an int.
struct ResultIndex {
    std::int64_t wide;
    HCP_INLINE operator int() const { return static_cast<int>(wide); }
};

struct DepthRange {
    int begin, end;  // in units
};

HCP_INLINE int round_up(int x, int multiple) {
    return (x + multiple - 1) / multiple * multiple;
}

/// The unit at x in every lane.
HCP_INLINE VecUint broadcast_unit(const std::uint32_t* x) {
    return *x - VecUint{};
}

HCP_INLINE VecUint load_units(const std::uint32_t* x) {
    VecUint v;
    std::memcpy(&v, x, sizeof(v));
    return v;
}

HCP_INLINE void store_units(std::uint32_t* x, VecUint v) {
    std::memcpy(x, &v, sizeof(v));
}

}  // namespace hybridcp::HCP_ISA
