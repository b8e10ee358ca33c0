#pragma once

// dq^ and dk^ of the value heads of a key head are summed in fp32 through the shared memory of
// their blocks: each block leaves its part, and finishes some rows of the sums.

#include "kernels/gdn/cuda/gradients_fragments.cuh"

namespace hybridcp::gdn::cuda::gradients {

/// Parts are 64 rows of 128 floats. Pieces of 32 bytes change places among four, so that neither
/// the lanes of a quad column nor those of a row meet in a bank.
HCP_DEVICE uint32_t part_address(uint32_t part, uint32_t row, uint32_t column) {
    return part + row * (kHeadDim * 4) + ((column * 4) ^ ((row & 3) << 5));
}

HCP_DEVICE void store_part(uint32_t part, const Place& at, const float (&sums)[64]) {
#pragma unroll
    for (uint32_t i = 0; i < 32; ++i) {
        device::store_shared(part_address(part, at.row + i % 2 * 8, i / 2 * 8 + at.pair),
                             device::Float2{sums[2 * i], sums[2 * i + 1]});
    }
}
HCP_DEVICE void add_part(uint32_t part, const Place& at, float (&sums)[64]) {
#pragma unroll
    for (uint32_t i = 0; i < 32; ++i) {
        const auto more = device::load_shared<device::Float2>(
            part_address(part, at.row + i % 2 * 8, i / 2 * 8 + at.pair));
        sums[2 * i] += more.x;
        sums[2 * i + 1] += more.y;
    }
}

/// Counts this warp in at the barrier of each block of the group.
HCP_DEVICE void arrive_group(const Block& block, uint32_t barrier) {
    device::sync_warp();
    if (device::lane_index() < block.group) {
        device::mbarrier_arrive_cluster(
            device::map_shared(block.barrier(barrier), device::lane_index()));
    }
}
/// Waits until nobody reads the parts of the chunk before.
HCP_DEVICE void wait_parts_empty(const Block& block, const Item& item) {
    device::mbarrier_wait(block.barrier(kPartsEmpty), item.parity() ^ 1);
}

HCP_DEVICE void hand_out_part(const Block& block,
                              const Place& at,
                              uint32_t part,
                              const float (&sums)[64]) {
    store_part(block.shared + part, at, sums);
    if (block.group > 1) {
        device::fence_cluster();
    }
    arrive_group(block, kPartsFull);
}

/// Columns 4 (lane % 8) + 32 i of a row.
struct RowPiece {
    float value[16];
};

HCP_DEVICE RowPiece sum_parts(const Block& block, uint32_t part, uint32_t row) {
    RowPiece sum = {};
    const uint32_t column = device::lane_index() % 8 * 4;
    for (uint32_t rank = 0; rank < block.group; ++rank) {
        const uint32_t from = device::map_shared(block.shared + part, rank);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const auto x =
                device::load_cluster<device::Float4>(part_address(from, row, column + 32 * i));
            sum.value[4 * i] += x.x;
            sum.value[4 * i + 1] += x.y;
            sum.value[4 * i + 2] += x.z;
            sum.value[4 * i + 3] += x.w;
        }
    }
    return sum;
}

/// dx = r (dx^ - x^ <x^, dx^>), by the 8 lanes of a row.
HCP_DEVICE void undo_normalisation(RowPiece& dx, uint32_t tile, uint32_t row, float norm) {
    RowPiece x;
    float dot = 0.0F;
    const uint32_t column = device::lane_index() % 8 * 4;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const auto words = device::load_shared<device::Word2>(element(tile, row, column + 32 * i));
        const device::Float2 low = device::unpack_bf16(words.x),
                             high = device::unpack_bf16(words.y);
        x.value[4 * i] = low.x;
        x.value[4 * i + 1] = low.y;
        x.value[4 * i + 2] = high.x;
        x.value[4 * i + 3] = high.y;
    }
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
        dot += x.value[i] * dx.value[i];
    }
    for (uint32_t distance = 1; distance < 8; distance <<= 1) {
        dot += device::shuffle_xor(dot, distance);
    }
    const float along = norm * norm * dot;
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
        dx.value[i] = norm * (dx.value[i] - along * x.value[i]);
    }
}

HCP_DEVICE void store_row(uint16_t* to, const RowPiece& dx) {
    const uint32_t column = device::lane_index() % 8 * 4;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const device::Word2 words = {device::pack_bf16(dx.value[4 * i], dx.value[4 * i + 1]),
                                     device::pack_bf16(dx.value[4 * i + 2], dx.value[4 * i + 3])};
        device::store_global(reinterpret_cast<device::Word2*>(to + column + 32 * i), words);
    }
}

/// dq and dk: the group's blocks take four rows in turn, and so do the 12 warps of a block.
HCP_DEVICE void reduce_parts(const GradientsParams& p, const Block& block, const Item& item) {
    constexpr uint32_t kFours = kChunkTokens / 4, kWarps = kWorkingThreads / 32;
    device::mbarrier_wait(block.barrier(kPartsFull), item.parity());
    if (block.group > 1) {
        device::fence_cluster();
    }
    const uint32_t first = block.rank + block.group * device::warp_index();
    for (uint32_t four = first; four < 2 * kFours; four += block.group * kWarps) {
        const bool of_keys = four >= kFours;
        const uint32_t row = four % kFours * 4 + device::lane_index() / 8;
        RowPiece dx = sum_parts(block, of_keys ? kKeyPart : kQueryPart, row);
        if (p.shape.use_qk_l2norm) {
            const uint32_t norms =
                block.slot(item.turn) + (of_keys ? kKeyNorm : kQueryNorm) * kVectorBytes;
            undo_normalisation(dx, block.tile(of_keys ? kKeys : kQueries), row,
                               device::load_shared<float>(norms + 4 * row));
        }
        if (static_cast<int32_t>(row) < item.span.tokens) {
            const int64_t at = (item.span.token + int64_t{row}) * p.shape.key_heads + item.key_head;
            store_row((of_keys ? p.dk : p.dq) + at * kHeadDim, dx);
        }
    }
    // No fence: the parts' values went into what is stored above, so they have been read.
    arrive_group(block, kPartsEmpty);
    release(block, kKeys);
    release(block, kQueries);
    arrive_warp(block, kGatesEmpty + item.parity());
}

}  // namespace hybridcp::gdn::cuda::gradients
