#pragma once

// Products of a warpgroup over the tiles of the gradients kernel, and T as their operand.

#include "kernels/gdn/cuda/gradients_fragments.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients {

/// As matrix_descriptor, `bytes` into a tile: only an addition differs from step to step.
HCP_DEVICE uint64_t tile_descriptor(uint32_t tile,
                                    uint32_t bytes,
                                    uint32_t leading_bytes,
                                    uint32_t stride_bytes) {
    const uint64_t fixed = device::matrix_descriptor(0, leading_bytes, stride_bytes);
    const uint32_t low = (tile >> 4) + ((bytes >> 4) + static_cast<uint32_t>(fixed));
    return fixed >> 32 << 32 | low;
}
/// Descriptors of a tile whose columns are contiguous: k along rows, or k along columns.
HCP_DEVICE uint64_t rows_descriptor(uint32_t tile, uint32_t step) {
    return tile_descriptor(tile, step / 4 * (2 * kPanelBytes) + step % 4 * 2048, kPanelBytes, 1024);
}
HCP_DEVICE uint64_t columns_descriptor(uint32_t tile, uint32_t step) {
    return tile_descriptor(tile, step / 4 * kPanelBytes + step % 4 * 32, 16, 1024);
}

/// sums (+)= A B in fp16 or bf16, B of 64 rows and 128 columns. Issues only: finish() waits.
template <bool kF16>
HCP_DEVICE void multiply(float (&sums)[64], const uint32_t (&a)[4][4], uint32_t b_tile, bool add) {
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const uint64_t b = rows_descriptor(b_tile, step);
        if constexpr (kF16) {
            device::wgmma_registers_f16<device::Major::kMn>(sums, a[step], b, add || step > 0);
        } else {
            device::wgmma_registers<device::Major::kMn>(sums, a[step], b, add || step > 0);
        }
    }
    device::wgmma_commit();
}
/// sums += A B of a tile A of 64 x 64.
HCP_DEVICE void multiply_square(float (&sums)[64], uint32_t a_tile, uint32_t b_tile) {
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        device::wgmma_shared<device::Major::kK, device::Major::kMn>(
            sums, columns_descriptor(a_tile, step), rows_descriptor(b_tile, step), true);
    }
    device::wgmma_commit();
}
/// sums += A^T B of a tile A of 64 x 64.
HCP_DEVICE void multiply_transposed(float (&sums)[64], uint32_t a_tile, uint32_t b_tile) {
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        device::wgmma_shared<device::Major::kMn, device::Major::kMn>(
            sums, rows_descriptor(a_tile, step), rows_descriptor(b_tile, step), true);
    }
    device::wgmma_commit();
}
/// sums = A B of a tile A of 64 x 128 and a state B, all of its columns or the 64 from a panel on.
template <int Count>
HCP_DEVICE void multiply_state(float (&sums)[Count], uint32_t a_tile, uint32_t b_tile) {
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        multiply_shared<device::Major::kK, device::Major::kMn>(
            sums, columns_descriptor(a_tile, step), rows_descriptor(b_tile, step), step > 0);
    }
    device::wgmma_commit();
}
/// pairs = A B^T, both 64 x 128.
HCP_DEVICE void multiply_pairs(float (&pairs)[32], uint32_t a_tile, uint32_t b_tile) {
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        device::wgmma_shared<device::Major::kK, device::Major::kK>(
            pairs, columns_descriptor(a_tile, step), columns_descriptor(b_tile, step), step > 0);
    }
    device::wgmma_commit();
}
/// pairs = A B^T with the 32 rows of B from `b_tile` on.
HCP_DEVICE void multiply_half(float (&pairs)[16], uint32_t a_tile, uint32_t b_tile) {
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        multiply_shared<device::Major::kK, device::Major::kK>(
            pairs, columns_descriptor(a_tile, step), columns_descriptor(b_tile, step), step > 0);
    }
    device::wgmma_commit();
}

template <int Count>
HCP_DEVICE void finish(float (&sums)[Count]) {
    device::wgmma_wait<0>();
    device::keep_registers(sums);
}

/// T diag(beta) as operand A. Blocks above the diagonal are not read.
HCP_DEVICE void load_inverse(uint32_t (&a)[4][4], uint32_t tile, uint32_t beta, const Place& at) {
    const uint32_t lane = device::lane_index();
    const uint32_t row = inverse_row(lane % 16, lane / 16);
#pragma unroll
    for (uint32_t step = 0; step < 4; ++step) {
        device::load_matrix(a[step], tile + inverse_block(at.warp, step) + row);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const device::Float2 t = device::unpack_f16(a[step][i]);
            const device::Float2 b = pair_at(beta, 16 * step + i / 2 * 8 + at.pair);
            a[step][i] = step <= at.warp ? pack_operand(t.x * b.x, t.y * b.y) : 0;
        }
    }
}

/// T^T as operand A. Blocks of T above the diagonal are not read.
HCP_DEVICE void load_inverse_transposed(uint32_t (&a)[4][4], uint32_t tile, const Place& at) {
    const uint32_t lane = device::lane_index();
    const uint32_t row = inverse_row(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (uint32_t step = 0; step < 4; ++step) {
        device::load_matrix_transposed(a[step], tile + inverse_block(step, at.warp) + row);
#pragma unroll
        for (uint32_t& pair : a[step]) {
            const device::Float2 t = device::unpack_f16(pair);
            const uint32_t operand = kFp16 ? pair : device::pack_bf16(t.x, t.y);
            pair = step >= at.warp ? operand : 0;
        }
    }
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients
