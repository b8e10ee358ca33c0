#pragma once

// The last step of the gradients kernel: rows of dq^ and dk^, summed over the group, to dq and dk.

#include "kernels/gdn/cuda/gradients_group.cuh"

namespace hybridcp::gdn::cuda::gradients {

/// dx = r (dx^ - x^ <x^, dx^>), by the four lanes of a row.
HCP_DEVICE void undo_normalisation(float (&dx)[32], const uint32_t (&rows)[16], float norm) {
    float dots[2] = {0.0F, 0.0F};
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
        const device::Float2 x = device::unpack_bf16(rows[i]);
        dots[i % 2] += x.x * dx[2 * i];
        dots[i % 2] += x.y * dx[2 * i + 1];
    }
    const float along = norm * norm * sum_pairs_of_row(dots[0] + dots[1]);
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
        const device::Float2 x = device::unpack_bf16(rows[i]);
        dx[2 * i] = norm * (dx[2 * i] - along * x.x);
        dx[2 * i + 1] = norm * (dx[2 * i + 1] - along * x.y);
    }
}

/// Eight rows of 256 bytes, 16 bytes at a time.
HCP_DEVICE uint32_t staged(uint32_t tile, uint32_t row, uint32_t piece) {
    return tile + row * 256 + (piece ^ row) * 16;
}

/// Of each pair of rows 8 apart the kept one, or that `below` if the block is alone.
HCP_DEVICE void store_rows_of(const GradientsParams& p,
                              const Block& block,
                              const Item& item,
                              const Place& at,
                              Sum sum,
                              uint32_t below,
                              const float (&dx)[32]) {
    const uint32_t lane = device::lane_index();
    const uint32_t tile =
        block.shared + kReceived + sum * kReceivedBytes + at.warp * kReceivedWarpBytes;
    device::sync_warp();
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        uint32_t packed[4];
        for (uint32_t j = 0; j < 4; ++j) {
            packed[j] = device::pack_bf16(dx[8 * i + 2 * j], dx[8 * i + 2 * j + 1]);
        }
        device::store_matrix(staged(tile, lane % 8, 4 * i + lane / 8), packed);
    }
    device::sync_warp();
    uint16_t* to = (sum == kKeySum ? p.dk : p.dq) + item.span.token * p.shape.key_row() +
                   int64_t{item.key_head} * kHeadDim;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t top = 2 * i + lane / 16, piece = lane % 16;
        const uint32_t of_16 = top + (block.group > 1 ? kept_row(block, top) : below);
        const uint32_t row = 16 * at.warp + of_16;
        const auto words = device::load_shared<device::Word4>(staged(tile, top, piece));
        if (owner_of(block, of_16) == block.rank && static_cast<int32_t>(row) < item.span.tokens) {
            device::store_global(
                reinterpret_cast<device::Word4*>(to + row * p.shape.key_row() + piece * 8), words);
        }
    }
}

/// A row of dx^ of each lane to dx; `rows` as load_kept_rows leaves them.
HCP_DEVICE void finish_rows(const GradientsParams& p,
                            const Block& block,
                            const Item& item,
                            const Place& at,
                            Sum sum,
                            uint32_t below,
                            float (&dx)[32],
                            const uint32_t (&rows)[16]) {
    if (p.shape.use_qk_l2norm) {
        const uint32_t norms =
            block.slot(item.turn) + (sum == kKeySum ? kKeyNorm : kQueryNorm) * kVectorBytes;
        undo_normalisation(dx, rows, device::load_shared<float>(norms + 4 * (at.row + below)));
    }
    store_rows_of(p, block, item, at, sum, below, dx);
}

/// `rows`: from take_rows.
HCP_DEVICE void sum_and_store(const GradientsParams& p,
                              const Block& block,
                              const Item& item,
                              const Place& at,
                              Sum sum,
                              const float (&sums)[64],
                              uint32_t (&rows)[16]) {
    const uint32_t below = kept_row(block, device::lane_index() / 4);
    float kept[32], given[32];
#pragma unroll
    for (uint32_t i = 0; i < 32; ++i) {
        const float first = sums[i / 2 * 4 + i % 2], second = sums[i / 2 * 4 + 2 + i % 2];
        kept[i] = below == 0 ? first : second;
        given[i] = below == 0 ? second : first;
    }
    if (block.group > 1) {
        exchange(block, item, at, sum, kept, given);
    }
    finish_rows(p, block, item, at, sum, below, kept, rows);
    if (block.group > 1) {
        release_received(block, at, sum);
    } else {
        const Tile tile = sum == kKeySum ? kKeys : kQueries;
        load_kept_rows(block, at, tile, 8, rows);
        release(block, tile);
        finish_rows(p, block, item, at, sum, 8, given, rows);
    }
    arrive_warp(block, kGatesEmpty + item.parity());
}

}  // namespace hybridcp::gdn::cuda::gradients
