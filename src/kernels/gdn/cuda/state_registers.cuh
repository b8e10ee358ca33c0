#pragma once

// A state and R in the registers of a warpgroup, and the products they go into. The state is kept
// transposed, V rows x K columns; warp w has V rows 16 w to 16 w + 15 of 64, R is V rows x tokens.

#include "kernels/gdn/cuda/head_scale.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

struct StateRegisters {
    float h[64];  // columns 8 j.. of K in h[4 j..]
    uint32_t packed[8]
                   [4];  // the state in bf16: the first operand of products over K (with K and Q)
    uint32_t r[4][4];    // R, the first operand of products over tokens

    /// Where h[j] lies in a state of K x V whose columns from `first_column` on are here.
    HCP_DEVICE static int64_t place(int j, uint32_t first_column) {
        const uint32_t warp = device::warp_index() % 4, lane = device::lane_index();
        const uint32_t k = 8 * (j >> 2) + 2 * (lane & 3) + (j & 1);
        return int64_t{k} * kHeadDim + first_column + 16 * warp + lane / 4 + (j >> 1 & 1) * 8;
    }

    HCP_DEVICE void pack() {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            packed[i / 4][i % 4] = device::pack_bf16(h[2 * i], h[2 * i + 1]);
        }
    }
    /// What pack() rounds off, in bf16: 16 bits in two products.
    HCP_DEVICE void pack_rest() {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const device::Float2 kept = device::unpack_bf16(packed[i / 4][i % 4]);
            packed[i / 4][i % 4] = device::pack_bf16(h[2 * i] - kept.x, h[2 * i + 1] - kept.y);
        }
    }
    HCP_DEVICE void scale(float factor) {
#pragma unroll
        for (int j = 0; j < 64; ++j) {
            h[j] *= factor;
        }
    }
    HCP_DEVICE void keep_packed() {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            device::keep_registers(packed[k]);
        }
    }
    HCP_DEVICE void keep_r() {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            device::keep_registers(r[k]);
        }
    }

    /// d (+)= the packed state times the rows of a tile of tokens x K.
    HCP_DEVICE void issue_rows(float (&d)[32], uint32_t tile, bool add = false) {
        const uint64_t rows = device::matrix_descriptor(tile, 16, 1024);
        device::keep_registers(d);
        keep_packed();
        device::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const uint64_t at = device::advance(rows, (k >> 2) * kPanelBytes + (k & 3) * 32);
            device::wgmma_registers<device::Major::kK>(d, packed[k], at, add || k > 0);
        }
        device::wgmma_commit();
    }
    /// h += R X, X of tokens x K.
    HCP_DEVICE void issue_update(uint32_t x_tile) {
        const uint64_t x = device::matrix_descriptor(x_tile, kPanelBytes, 1024);
        device::keep_registers(h);
        keep_r();
        device::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            multiply_registers<device::Major::kMn>(h, r[k], device::advance(x, k * 2048), true);
        }
        device::wgmma_commit();
    }
    /// d += R Y^T, Y of tokens x tokens.
    HCP_DEVICE void issue_output(float (&d)[32], uint32_t y_tile) {
        const uint64_t y = device::matrix_descriptor(y_tile, 16, 1024);
        device::keep_registers(d);
        keep_r();
        device::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            multiply_registers<device::Major::kK>(d, r[k], device::advance(y, k * 32), true);
        }
        device::wgmma_commit();
    }

    /// In fp32, as half a checkpoint (tables.h).
    HCP_DEVICE void store_all(float* to, float factor) const {
        to += 4 * (device::thread_index() % 128);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            device::store_global(reinterpret_cast<device::Float4*>(to + 512 * j),
                                 device::Float4{factor * h[4 * j], factor * h[4 * j + 1],
                                                factor * h[4 * j + 2], factor * h[4 * j + 3]});
        }
    }
    HCP_DEVICE void load_all(const float* from) {
        from += 4 * (device::thread_index() % 128);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const auto four =
                device::load_global(reinterpret_cast<const device::Float4*>(from + 512 * j));
            h[4 * j] = four.x;
            h[4 * j + 1] = four.y;
            h[4 * j + 2] = four.z;
            h[4 * j + 3] = four.w;
        }
    }

    /// The state as operand into two panels of V rows x K.
    HCP_DEVICE void store_image(uint32_t tile) const {
        const uint32_t lane = device::lane_index();
        const uint32_t row = 16 * (device::warp_index() % 4) + (lane & 15);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            uint32_t words[4];
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const float* from = h + 8 * k + 2 * x;
                words[x] = kFp16 ? device::pack_f16(from[0], from[1]) : packed[k][x];
            }
            const uint32_t column = 16 * ((2 * k & 7) + (lane >> 4));
            device::store_matrix(
                tile + (k >> 2) * kPanelBytes + device::swizzle_128(row * 128 + column), words);
        }
    }
};

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
