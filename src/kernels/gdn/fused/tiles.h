// Tiles of AMX: 16 rows of 16 units. With HCP_EMULATED_TILES (tests) the same in plain C++, for
// CPUs without them.
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
    static constexpr struct alignas(64) {  // the compiler sees but 8 bytes of it read
        std::uint8_t palette = 1;
        std::uint8_t start_row = 0;
        std::uint8_t reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration = {};
    _tile_loadconfig(&configuration);
}

HCP_INLINE void release_tiles() {
    _tile_release();
    _mm_sfence();  // what was written past the caches
}

/// result [32][32] = left * right, or with Add that much more; strides in units. After
/// `right_depth` units the right operand begins again.
template <bool Add = false>
HCP_INLINE void multiply_tiles(const std::uint32_t* left,
                               int left_stride,
                               const std::uint32_t* right,
                               int depth,
                               float* result,
                               int result_row = kPanel,
                               int right_depth = 1 << 20) {
    const int left_bytes = left_stride * 4, result_bytes = result_row * 4;
    if constexpr (Add) {
        _tile_loadd(0, result, result_bytes);
        _tile_loadd(1, result + kTileUnits, result_bytes);
        _tile_loadd(2, result + kTileRows * result_row, result_bytes);
        _tile_loadd(3, result + kTileRows * result_row + kTileUnits, result_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int u = 0; u < depth; u += kTileUnits) {
        const std::uint32_t* columns = right + (u < right_depth ? u : u - right_depth) * kPanel;
        _tile_loadd(4, left + u, left_bytes);
        _tile_loadd(6, columns, kPanel * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, columns + kTileUnits, kPanel * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + kTileRows * left_stride + u, left_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, result, result_bytes);
    _tile_stored(1, result + kTileUnits, result_bytes);
    _tile_stored(2, result + kTileRows * result_row, result_bytes);
    _tile_stored(3, result + kTileRows * result_row + kTileUnits, result_bytes);
}

#else

HCP_INLINE void configure_tiles() {}
HCP_INLINE void release_tiles() {}

template <bool Add = false>
HCP_INLINE void multiply_tiles(const std::uint32_t* left,
                               int left_stride,
                               const std::uint32_t* right,
                               int depth,
                               float* result,
                               int result_row = kPanel,
                               int right_depth = 1 << 20) {
    for (int i = 0; i < 2 * kTileRows; ++i) {
        for (int j = 0; j < kPanel; j += kLanes) {
            Vec sum = Add ? load(result + i * result_row + j) : Vec{};
            for (int u = 0; u < depth; ++u) {
                const int unit = u < right_depth ? u : u - right_depth;
                sum = Bf16Arithmetic::multiply_add(sum, broadcast_unit(left + i * left_stride + u),
                                                   load_units(right + unit * kPanel + j));
            }
            store(result + i * result_row + j, sum);
        }
    }
}

#endif

}  // namespace hybridcp::HCP_ISA
