#pragma once

// T = (I + L)^-1 for a strictly lower L of 64 x 64, by one warpgroup: blocks of 8 by substitution
// in fp32, the rest by fp16 products of blocks. Warp w makes diagonal block w of 16, and then, from
// all those, block column w. Off-diagonal blocks above the diagonal are left undefined.

#include "kernels/gdn/cuda/operands.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

/// Shared memory of the inverse: T as tables.h lays it out, rows 16 to 63 of L in fp16 and its
/// diagonal blocks of 8 in fp32.
struct InverseTiles {
    static constexpr uint32_t kLowerRowBytes = 112;
    static constexpr uint32_t kDiagonalAt = kInverseBytes + 48 * kLowerRowBytes;
    static constexpr uint32_t kColumnBytes = 48;  // 8 rows, padded against bank conflicts
    static constexpr uint32_t kBytes = kDiagonalAt + 64 * kColumnBytes;

    uint32_t base;

    /// A half of a row of the diagonal block.
    HCP_DEVICE uint32_t diagonal_row(uint32_t block, uint32_t row, uint32_t half) const {
        return base + inverse_block(block, block) + inverse_row(row, half);
    }
    HCP_DEVICE uint32_t lower_at(uint32_t row, uint32_t column) const {
        return base + kInverseBytes + (row - 16) * kLowerRowBytes + 2 * column;
    }
    /// Element of the diagonal blocks of 8 of warp `block`: columns 0 to 7 are the first's.
    HCP_DEVICE uint32_t diagonal_at(uint32_t block, uint32_t row, uint32_t column) const {
        return base + kDiagonalAt + (16 * block + column) * kColumnBytes + 4 * row;
    }
    /// Address for a transposing load or store of a 16 x 16 block of T, which is then T's transpose
    /// as the first operand of a product; or for a load of it as a second operand.
    HCP_DEVICE uint32_t block_at(uint32_t block_row, uint32_t block_column) const {
        const uint32_t lane = device::lane_index();
        return base + inverse_block(block_row, block_column) +
               inverse_row((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1);
    }
};

/// Solves this warp's two diagonal blocks of 8, one column a lane (twice), into T. All lanes call.
HCP_DEVICE void substitute(const InverseTiles& tiles, uint32_t warp) {
    const uint32_t lane = device::lane_index(), column = lane & 15, own = lane & 7;
    float x[8];
#pragma unroll
    for (uint32_t row = 0; row < 8; ++row) {
        x[row] = row == own ? 1.0F : 0.0F;
    }
    device::Float4 low[3], high[7];
#pragma unroll
    for (uint32_t k = 0; k < 7; ++k) {
        const uint32_t from = tiles.diagonal_at(warp, 0, (column & 8) + k);
        if (k < 3) {
            low[k] = device::load_shared<device::Float4>(from);
        }
        high[k] = device::load_shared<device::Float4>(from + 16);
    }
#pragma unroll
    for (uint32_t k = 0; k < 7; ++k) {
        const float l[8] = {0.0F,
                            k < 1 ? low[k < 3 ? k : 0].y : 0.0F,
                            k < 2 ? low[k < 3 ? k : 0].z : 0.0F,
                            k < 3 ? low[k < 3 ? k : 0].w : 0.0F,
                            high[k].x,
                            high[k].y,
                            high[k].z,
                            high[k].w};
#pragma unroll
        for (uint32_t row = k + 1; row < 8; ++row) {
            x[row] -= l[row] * x[k];
        }
    }
    const bool second = lane >= 16;  // stores rows 4 to 7
    const uint32_t first = (column & 8) + (second ? 4 : 0);
    const uint32_t to = tiles.diagonal_row(warp, first, column >> 3) + 2 * own;
#pragma unroll
    for (uint32_t row = 0; row < 4; ++row) {
        const float value = second ? x[row + 4] : x[row];
        device::store_shared(to + 32 * row, static_cast<uint16_t>(device::pack_f16(value, 0.0F)));
    }
    device::sync_warp();
}

/// Diagonal block `warp` of T from its blocks of 8 and what lies below the first: `corner` is that
/// part of L in fp16, as a fragment. After a sync_warp behind the stores to diagonal_at.
HCP_DEVICE void invert_diagonal(const InverseTiles& tiles, uint32_t warp, uint32_t corner) {
    substitute(tiles, warp);
    const uint32_t row = device::lane_index() & 7;
    uint32_t first[1], second[1];
    device::load_matrix_transposed(first, tiles.diagonal_row(warp, row, 0));
    device::load_matrix(second, tiles.diagonal_row(warp, 8 + row, 1));
    // Transposed, so that a result is the first operand of the next product.
    float d[4] = {0, 0, 0, 0}, e[4] = {0, 0, 0, 0};
    device::mma_f16(d, {first[0], 0, 0, 0}, {corner, 0});
    device::mma_f16(e, {device::pack_f16(-d[0], -d[1]), 0, 0, 0}, {second[0], 0});
    device::store_matrix_transposed(tiles.diagonal_row(warp, 8 + row, 0),
                                    {device::pack_f16(e[0], e[1])});
}

/// d += a B^T for a block B of 16 x 16 as load_matrix gives it.
HCP_DEVICE void multiply_block(float (&d)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    device::mma_f16(d[0], a, {b[0], b[1]});
    device::mma_f16(d[1], a, {b[2], b[3]});
}
/// -sum B^T, as the first operand of the next product in `t` and in fp32.
HCP_DEVICE void solve_block(const float (&sum)[2][4],
                            const uint32_t (&b)[4],
                            float (&e)[2][4],
                            uint32_t (&t)[4]) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        const float* from = sum[x >> 1] + 2 * (x & 1);
        t[x] = device::pack_f16(-from[0], -from[1]);
        e[x >> 1][2 * (x & 1)] = e[x >> 1][2 * (x & 1) + 1] = 0.0F;
    }
    multiply_block(e, t, b);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        t[x] = device::pack_f16(e[x >> 1][2 * (x & 1)], e[x >> 1][2 * (x & 1) + 1]);
    }
}

/// L and the diagonal blocks of T, as second operands.
struct LowerBlocks {
    uint32_t lower[4][3][4], diagonal[4][4];
    HCP_DEVICE void load(const InverseTiles& tiles) {
        const uint32_t lane = device::lane_index();
        const uint32_t row = (lane >> 4) * 8 + (lane & 7), column = lane & 8;
#pragma unroll
        for (uint32_t i = 1; i < 4; ++i) {
#pragma unroll
            for (uint32_t k = 0; k < i; ++k) {
                device::load_matrix(lower[i][k], tiles.lower_at(16 * i + row, 16 * k + column));
            }
            device::load_matrix(diagonal[i], tiles.block_at(i, i));
        }
    }
};

/// Block column `warp` of T from its diagonal blocks and L, T_iw = -T_ii (L_iw T_ww + .. + L_i,i-1
/// T_i-1,w), into `tiles`. a[k] is block (k, warp) transposed, times a factor for each of the 16
/// tokens of block k (floats at `factors`), in bf16 as a first operand; 0 above the diagonal.
HCP_DEVICE void finish_column(const InverseTiles& tiles,
                              uint32_t warp,
                              uint32_t factors,
                              uint32_t (&a)[4][4]) {
    uint32_t t[4], own[4];
    LowerBlocks blocks;
    float sum[4][2][4];
    const uint32_t pair = 8 * (device::lane_index() & 3);
    const auto factor = [&](uint32_t block, uint32_t half) {
        return device::load_shared<device::Float2>(factors + 64 * block + 32 * half + pair);
    };
    device::load_matrix_transposed(t, tiles.block_at(warp, warp));
    blocks.load(tiles);
#pragma unroll
    for (uint32_t x = 0; x < 4; ++x) {
        const device::Float2 value = device::unpack_f16(t[x]), f = factor(warp, x >> 1);
        own[x] = device::pack_bf16(value.x * f.x, value.y * f.y);
    }
#pragma unroll
    for (int x = 0; x < 32; ++x) {
        sum[x >> 3][x >> 2 & 1][x & 3] = 0.0F;
    }
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            a[k][x] = k == warp ? own[x] : 0;
        }
        if (k > 0 && k > warp) {
            float e[2][4];
            solve_block(sum[k], blocks.diagonal[k], e, t);
            device::store_matrix_transposed(tiles.block_at(k, warp), t);
#pragma unroll
            for (uint32_t x = 0; x < 4; ++x) {
                const device::Float2 f = factor(k, x >> 1);
                const float* from = e[x >> 1] + 2 * (x & 1);
                a[k][x] = device::pack_bf16(from[0] * f.x, from[1] * f.y);
            }
        }
        if (k >= warp) {
#pragma unroll
            for (uint32_t i = k + 1; i < 4; ++i) {
                multiply_block(sum[i], t, blocks.lower[i][k]);
            }
        }
    }
}

/// What finish_column rounded off a, in bf16. T is that of the tiles, in fp16: 11 bits. All warps'
/// columns are finished.
HCP_DEVICE void take_column_rest(const InverseTiles& tiles,
                                 uint32_t warp,
                                 uint32_t factors,
                                 uint32_t (&a)[4][4]) {
    const uint32_t pair = 8 * (device::lane_index() & 3);
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
        if (k < warp) {
            continue;  // a is 0
        }
        uint32_t t[4];
        device::load_matrix_transposed(t, tiles.block_at(k, warp));
#pragma unroll
        for (uint32_t x = 0; x < 4; ++x) {
            const auto f =
                device::load_shared<device::Float2>(factors + 64 * k + 32 * (x >> 1) + pair);
            const device::Float2 value = device::unpack_f16(t[x]);
            const device::Float2 taken = device::unpack_bf16(a[k][x]);
            a[k][x] = device::pack_bf16(value.x * f.x - taken.x, value.y * f.y - taken.y);
        }
    }
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
