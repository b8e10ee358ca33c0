// Products on AMX tiles: 32 x 32 results from two by two tiles.
#pragma once

#include "kernels/gdn/fused/tiles.h"

namespace hybridcp::HCP_ISA {

struct TileEngine : Bf16Arithmetic {
    static constexpr bool kTiles = true;
    static constexpr int kRows = 2 * kTileRows;
    static constexpr int kRowMultiple = kRows;
    static constexpr int kChunk = 64;
    static constexpr int kRowsAhead = 6;  // asked for in each block

    static void begin() { configure_tiles(); }
    static void end() { release_tiles(); }

    /// As SimdEngine's; right_depth: as in multiply_tiles.
    template <bool Add = false, typename Depth>
    static HCP_INLINE void multiply_to(
        const Product& product, Depth depth, float* to, int row, int right_depth = 1 << 20) {
        const LeftOperand left = product.left;
        for (int j = 0; j < product.columns; j += kPanel) {
            const std::uint32_t* panel =
                product.right.units + (j / kPanel) * product.right.panel_stride;
            for (int i = 0; i < product.rows; i += kRows) {
                if (product.triangle != 0 && j >= i % product.triangle + kRows) {
                    continue;
                }
                const DepthRange range = depth(i);
                product.ahead.ask_in_block(kRowsAhead, (range.end - range.begin) * kPerUnit);
                const int begin = range.begin / kTileUnits * kTileUnits;
                multiply_tiles<Add>(left.row(i) + begin, left.row_stride, panel + begin * kPanel,
                                    range.end - begin, to + i * row + j, row, right_depth);
            }
        }
    }

    /// As SimdEngine's; left.unit_stride is 1.
    template <typename Depth, typename Epilogue>
    static HCP_INLINE void multiply(const Product& product, Depth depth, Epilogue epilogue) {
        alignas(64) float result[kRows * kPanel];
        const LeftOperand left = product.left;
        for (int j = 0; j < product.columns; j += kPanel) {
            const std::uint32_t* panel =
                product.right.units + (j / kPanel) * product.right.panel_stride;
            for (int i = 0; i < product.rows; i += kRows) {
                if (product.triangle != 0 && j >= i % product.triangle + kRows) {
                    continue;
                }
                const DepthRange range = depth(i);
                product.ahead.ask_in_block(kRowsAhead, (range.end - range.begin) * kPerUnit);
                const int begin = range.begin / kTileUnits * kTileUnits;
                multiply_tiles(left.row(i) + begin, left.row_stride, panel + begin * kPanel,
                               range.end - begin, result);
                for (int m = 0; m < kRows; m += 2) {
#pragma GCC unroll 2
                    for (int n = 0; n < kPanel; n += kLanes) {
                        epilogue(ResultIndex{i + m}, ResultIndex{j + n},
                                 load(result + m * kPanel + n),
                                 load(result + (m + 1) * kPanel + n));
                    }
                }
            }
        }
    }
};

}  // namespace hybridcp::HCP_ISA
