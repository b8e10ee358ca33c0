#pragma once

// T = (I + L)^-1 for a strictly lower L of 64 x 64, by one warpgroup: blocks of 16 by substitution
// in fp32, then 16 to 32 to 64 by fp16 products, T_10 = -T_11 L_10 T_00. Off-diagonal blocks above
// the diagonal are left undefined.

#include "kernels/gdn/cuda/problem.cuh"

namespace hybridcp::gdn::cuda {

/// Shared memory of the inverse: T in fp16 with padded rows, then rows 16 to 63 of L in fp16. While
/// a warp solves its diagonal block, that block of L in fp32 lies in the warp's rows of T.
struct InverseTiles {
    static constexpr uint32_t kRowBytes = 144;
    static constexpr uint32_t kLowerRowBytes = 112;
    static constexpr uint32_t kDiagonalStride = 20;  // floats from one column to the next
    static constexpr uint32_t kBytes = 64 * kRowBytes + 48 * kLowerRowBytes;

    uint32_t base;

    HCP_DEVICE uint32_t at(uint32_t row, uint32_t column) const {
        return base + row * kRowBytes + 2 * column;
    }
    HCP_DEVICE uint32_t lower_at(uint32_t row, uint32_t column) const {
        return base + 64 * kRowBytes + (row - 16) * kLowerRowBytes + 2 * column;
    }
    /// Element of warp `block`'s diagonal block, stored by columns.
    HCP_DEVICE uint32_t diagonal_at(uint32_t block, uint32_t row, uint32_t column) const {
        return base + block * 16 * kRowBytes + 4 * (column * kDiagonalStride + row);
    }
};

/// This warp's diagonal block, one column a lane (twice); all 32 lanes call after a sync_warp.
HCP_DEVICE void invert_diagonal(const InverseTiles& tiles, uint32_t warp) {
    const uint32_t lane = device::lane_index(), column = lane & 15;
    float x[16];
#pragma unroll
    for (uint32_t row = 0; row < 16; ++row) {
        x[row] = row == column ? 1.0F : 0.0F;
    }
#pragma unroll
    for (int k = 0; k < 15; ++k) {
#pragma unroll
        for (int quad = (k + 1) / 4; quad < 4; ++quad) {
            const auto l = device::load_shared<device::Float4>(
                tiles.diagonal_at(warp, static_cast<uint32_t>(4 * quad), static_cast<uint32_t>(k)));
            if (4 * quad > k) {
                x[4 * quad] -= l.x * x[k];
            }
            if (4 * quad + 1 > k) {
                x[4 * quad + 1] -= l.y * x[k];
            }
            if (4 * quad + 2 > k) {
                x[4 * quad + 2] -= l.z * x[k];
            }
            if (4 * quad + 3 > k) {
                x[4 * quad + 3] -= l.w * x[k];
            }
        }
    }
    device::sync_warp();  // the block of L makes room
    const uint32_t half = lane >= 16 ? 8 : 0;
    const uint32_t to = tiles.at(16 * warp + half, 16 * warp + column);
#pragma unroll
    for (uint32_t row = 0; row < 8; ++row) {
        const float value = half == 0 ? x[row] : x[row + 8];
        device::store_shared(to + row * InverseTiles::kRowBytes,
                             static_cast<uint16_t>(device::pack_f16(value, 0.0F)));
    }
}

/// Registers of -d as the second operand of the next product.
HCP_DEVICE void negate_transposed(const float (&d)[4], uint32_t (&b)[2]) {
    b[0] = device::transpose_matrix(device::pack_f16(-d[0], -d[1]));
    b[1] = device::transpose_matrix(device::pack_f16(-d[2], -d[3]));
}
HCP_DEVICE void store_block(const float (&d)[4], uint32_t to) {
    device::store_shared(to, device::pack_f16(d[0], d[1]));
    device::store_shared(to + 8 * InverseTiles::kRowBytes, device::pack_f16(d[2], d[3]));
}

/// 16 to 32: two pairs of blocks, a warp makes 8 columns of one.
HCP_DEVICE void merge_pairs(const InverseTiles& tiles, uint32_t warp) {
    const uint32_t lane = device::lane_index(), row = lane & 15, right = (lane >> 4) * 8;
    const uint32_t pair = 32 * (warp >> 1), column = pair + 8 * (warp & 1);
    uint32_t lower[4], below[4], b[2];
    device::load_matrix(lower, tiles.lower_at(pair + 16 + row, pair + right));
    device::load_matrix_transposed(b, tiles.at(pair + row, column));
    device::load_matrix(below, tiles.at(pair + 16 + row, pair + 16 + right));
    float d[4] = {0, 0, 0, 0}, e[4] = {0, 0, 0, 0};
    device::mma_f16(d, lower, b);
    negate_transposed(d, b);
    device::mma_f16(e, below, b);
    store_block(e, tiles.at(pair + 16 + lane / 4, column + 2 * (lane & 3)));
}

/// 32 to 64: a warp makes 8 columns.
HCP_DEVICE void merge_halves(const InverseTiles& tiles, uint32_t warp) {
    const uint32_t lane = device::lane_index(), row = lane & 15, right = (lane >> 4) * 8;
    uint32_t t[4], a00[4], a01[4], a10[4], a11[4];
    device::load_matrix_transposed(t, tiles.at(lane, 8 * warp));
    device::load_matrix(a00, tiles.lower_at(32 + row, right));
    device::load_matrix(a01, tiles.lower_at(32 + row, 16 + right));
    device::load_matrix(a10, tiles.lower_at(48 + row, right));
    device::load_matrix(a11, tiles.lower_at(48 + row, 16 + right));
    const bool above = warp >= 2;  // rows 0 to 15 are not defined there
    uint32_t b0[2] = {above ? 0 : t[0], above ? 0 : t[1]}, b1[2] = {t[2], t[3]};
    float d0[4] = {0, 0, 0, 0}, d1[4] = {0, 0, 0, 0};
    device::mma_f16(d0, a00, b0);
    device::mma_f16(d1, a10, b0);
    device::mma_f16(d0, a01, b1);
    device::mma_f16(d1, a11, b1);
    device::load_matrix(a00, tiles.at(32 + row, 32 + right));
    device::load_matrix(a10, tiles.at(48 + row, 32 + right));
    device::load_matrix(a11, tiles.at(48 + row, 48 + right));
    negate_transposed(d0, b0);
    negate_transposed(d1, b1);
    float e0[4] = {0, 0, 0, 0}, e1[4] = {0, 0, 0, 0};
    device::mma_f16(e0, a00, b0);
    device::mma_f16(e1, a10, b0);
    device::mma_f16(e1, a11, b1);
    const uint32_t to = tiles.at(32 + lane / 4, 8 * warp + 2 * (lane & 3));
    store_block(e0, to);
    store_block(e1, to + 16 * InverseTiles::kRowBytes);
}

}  // namespace hybridcp::gdn::cuda
