#pragma once

// The last step of an item of the gradients kernel: rows of dq^ or dk^ to dq or dk.

#include "kernels/gdn/cuda/gradients_fragments.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients {

/// dx = r (dx^ - x^ <x^, dx^>), by the four lanes of a row; `dot` is <x, dx^>.
HCP_DEVICE void undo_normalisation(float (&dx)[64],
                                   const uint32_t (&rows)[8][4],
                                   device::Float2 dot,
                                   device::Float2 norm) {
    const float along[2] = {norm.x * norm.x * dot.x, norm.y * norm.y * dot.y};
#pragma unroll
    for (uint32_t i = 0; i < 32; ++i) {
        const device::Float2 x = device::unpack_bf16(rows[i / 4][i % 4]);
        const float r = i % 2 == 0 ? norm.x : norm.y;
        dx[2 * i] = r * (dx[2 * i] - along[i % 2] * x.x);
        dx[2 * i + 1] = r * (dx[2 * i + 1] - along[i % 2] * x.y);
    }
}

/// 16 rows of 64 bytes, 16 bytes at a time.
HCP_DEVICE uint32_t staged(uint32_t space, uint32_t row, uint32_t piece) {
    return space + row * 64 + (piece ^ row / 2 % 4) * 16;
}

/// The warp's rows to `to`, the first of the chunk's, a quarter at a time through `space`: 1 KB.
HCP_DEVICE void store_rows_of_warp(const float (&dx)[64],
                                   uint32_t space,
                                   uint16_t* to,
                                   int64_t row_elements,
                                   int32_t tokens,
                                   const Place& at) {
    const uint32_t lane = device::lane_index();
#pragma unroll
    for (uint32_t quarter = 0; quarter < 4; ++quarter) {
        device::sync_warp();
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            uint32_t packed[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const float* x = dx + 16 * quarter + 8 * half + 2 * i;
                packed[i] = device::pack_bf16(x[0], x[1]);
            }
            device::store_matrix(staged(space, lane % 16, 2 * half + lane / 16), packed);
        }
        device::sync_warp();
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t of_16 = 8 * half + lane / 4, row = 16 * at.warp + of_16;
            const auto words = device::load_shared<device::Word4>(staged(space, of_16, lane % 4));
            if (static_cast<int32_t>(row) < tokens) {
                device::store_global(reinterpret_cast<device::Word4*>(to + row * row_elements +
                                                                      32 * quarter + lane % 4 * 8),
                                     words);
            }
        }
    }
}

HCP_DEVICE void store_rows_of(const GradientsParams& p,
                              const Block& block,
                              const Turn& turn,
                              const Place& at,
                              uint16_t* all,
                              uint32_t space,
                              const float (&dx)[64]) {
    const Item item = served_item(block, turn);
    uint16_t* to = all + item.span.token * p.shape.key_row() + int64_t{item.key_head} * kHeadDim;
    store_rows_of_warp(dx, space, to, p.shape.key_row(), item.span.tokens, at);
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients
