#pragma once

// The warp of the gradients kernel that stores dv.

#include "kernels/gdn/cuda/gradients_fragments.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients {

/// Rows of a short chunk, after which the next segment's follow.
HCP_DEVICE void store_short_chunk(const GradientsParams& p,
                                  const Block& block,
                                  const Item& item,
                                  int32_t head) {
    const uint32_t lane = device::lane_index(), column = lane % 16 * 8;
    const auto tokens = static_cast<uint32_t>(item.span.tokens);
#pragma unroll 1
    for (uint32_t row = lane / 16; row < tokens; row += 2) {
        uint16_t* to = p.dv + int64_t{item.span.token + row} * p.shape.value_row() +
                       int64_t{head} * kHeadDim + column;
        device::store_global(
            reinterpret_cast<device::Word4*>(to),
            device::load_shared<device::Word4>(element(block.tile(kValueGradients), row, column)));
    }
    device::fence_proxy_async();
}

/// By one thread.
HCP_DEVICE void store_whole_chunk(const GradientsParams& p,
                                  const Block& block,
                                  const Item& item,
                                  int32_t head) {
    for (int32_t half = 0; half < 2; ++half) {
        device::tensor_store(
            &p.dv_map, block.tile(kValueGradients) + static_cast<uint32_t>(half) * kPanelBytes,
            {64 * half, head, item.span.token});
    }
    device::bulk_commit();
    device::bulk_wait_read<0>();
}

/// dV lies where Z did, which TMA loads again.
HCP_DEVICE void store_value_gradients(const GradientsParams& p, const Block& block) {
#pragma unroll 1
    for (uint32_t i = 0; i < block.items(); ++i) {
#pragma unroll 1
        for (uint32_t member = 0; member < block.group; ++member) {
            const Turn turn = turn_of(block, i, member);
            wait_gates(block, turn);
            const Item item = served_item(block, turn);
            const int32_t head = head_of(block, item.key_head, member);
            device::mbarrier_wait_sleeping(block.barrier(kValueGradientsReady), turn.parity(),
                                           kPollNs);
            if (item.span.tokens < kChunkTokens) {
                store_short_chunk(p, block, item, head);
            } else if (device::lane_index() == 0) {
                store_whole_chunk(p, block, item, head);
            }
            release(block, kValueGradients);
            arrive_warp(block, kGatesEmpty + turn.parity());
        }
    }
    device::bulk_wait<0>();
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients
