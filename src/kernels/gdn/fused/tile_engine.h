// Products on AMX tiles: 16 rows of 16 units, 32 x 32 results from two by two tiles. With
// HCP_EMULATED_TILES (tests) the same tiles in plain C++, for CPUs without them.
#pragma once

#include "kernels/gdn/fused/simd_engine.h"

#if defined(__AMX_BF16__) && !defined(HCP_EMULATED_TILES)
#include <immintrin.h>
#endif

namespace hybridcp::HCP_ISA {

inline constexpr int kTileRows = 16;
inline constexpr int kTileUnits = 16;

#if defined(__AMX_BF16__) && !defined(HCP_EMULATED_TILES)

HCP_INLINE void configure_tiles() {
    struct alignas(64) {
        std::uint8_t palette = 1;
        std::uint8_t start_row = 0;
        std::uint8_t reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    _tile_loadconfig(&configuration);
}

HCP_INLINE void release_tiles() {
    _tile_release();
}

/// result [32][32] = left * right; strides in units.
HCP_INLINE void multiply_tiles(const std::uint32_t* left,
                               int left_stride,
                               const std::uint32_t* right,
                               int depth,
                               float* result) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int left_bytes = left_stride * 4;
    for (int u = 0; u < depth; u += kTileUnits) {
        _tile_loadd(4, left + u, left_bytes);
        _tile_loadd(6, right + u * kPanel, kPanel * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + u * kPanel + kTileUnits, kPanel * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + kTileRows * left_stride + u, left_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, result, kPanel * 4);
    _tile_stored(1, result + kTileUnits, kPanel * 4);
    _tile_stored(2, result + kTileRows * kPanel, kPanel * 4);
    _tile_stored(3, result + kTileRows * kPanel + kTileUnits, kPanel * 4);
}

#else

HCP_INLINE void configure_tiles() {}
HCP_INLINE void release_tiles() {}

HCP_INLINE void multiply_tiles(const std::uint32_t* left,
                               int left_stride,
                               const std::uint32_t* right,
                               int depth,
                               float* result) {
    for (int i = 0; i < 2 * kTileRows; ++i) {
        for (int j = 0; j < kPanel; j += kLanes) {
            Vec sum = {};
            for (int u = 0; u < depth; ++u) {
                sum = Bf16Arithmetic::multiply_add(sum, broadcast_unit(left + i * left_stride + u),
                                                   load_units(right + u * kPanel + j));
            }
            store(result + i * kPanel + j, sum);
        }
    }
}

#endif

struct TileEngine : Bf16Arithmetic {
    static constexpr bool kTiles = true;
    static constexpr int kRows = 2 * kTileRows;
    static constexpr int kRowMultiple = kRows;
    static constexpr int kChunk = 32;
    static constexpr int kRowsAhead = 6;  // asked for in each block

    static void begin() { configure_tiles(); }
    static void end() { release_tiles(); }

    /// As SimdEngine's; left.unit_stride is 1.
    template <typename Depth, typename Epilogue>
    static HCP_INLINE void multiply(const Product& product, Depth depth, Epilogue epilogue) {
        alignas(64) float result[kRows * kPanel];
        const LeftOperand left = product.left;
        for (int j = 0; j < product.columns; j += kPanel) {
            const std::uint32_t* panel =
                product.right.units + (j / kPanel) * product.right.panel_stride;
            for (int i = 0; i < product.rows; i += kRows) {
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
