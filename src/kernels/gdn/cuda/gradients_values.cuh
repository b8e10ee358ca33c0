#pragma once

// The warp of the gradients kernel that stores dv.

#include "kernels/gdn/cuda/gradients_fragments.cuh"

namespace hybridcp::gdn::cuda::gradients {

/// The tile takes turns with Z, which TMA loads.
HCP_DEVICE void store_value_gradient(const GradientsParams& p,
                                     const Block& block,
                                     const Turn& turn) {
    const Item item = served_item(block, turn);
    const uint32_t tile = block.tile(kValueGradients), lane = device::lane_index();
    const int64_t row_elements = p.shape.value_row();
    const uint32_t first = lane / 16, column = lane % 16 * 8;
    uint16_t* to = p.dv + (item.span.token + int64_t{first}) * row_elements +
                   int64_t{head_of(block, item.key_head, turn.member)} * kHeadDim + column;
    device::mbarrier_wait_sleeping(block.barrier(kValueGradientsReady), turn.parity(), kPollNs);
#pragma unroll 4
    for (uint32_t i = 0; i < kChunkTokens; i += 2) {
        const auto words = device::load_shared<device::Word4>(element(tile, first + i, column));
        if (static_cast<int32_t>(first + i) < item.span.tokens) {
            device::store_global(reinterpret_cast<device::Word4*>(to + i * row_elements), words);
        }
    }
    device::fence_proxy_async();
    release(block, kValueGradients);
    arrive_warp(block, kGatesEmpty + turn.parity());
}

HCP_DEVICE void store_value_gradients(const GradientsParams& p, const Block& block) {
#pragma unroll 1
    for (uint32_t item = 0; item < block.items(); ++item) {
#pragma unroll 1
        for (uint32_t member = 0; member < block.group; ++member) {
            const Turn turn = turn_of(block, item, member);
            wait_gates(block, turn);
            store_value_gradient(p, block, turn);
        }
    }
}

}  // namespace hybridcp::gdn::cuda::gradients
