#pragma once

// The warp of the gradients kernel that stores dv.

#include "kernels/gdn/cuda/gradients_fragments.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients {

/// E and Z of a short chunk have landed: zeros beyond it, for the warp that loads them.
HCP_DEVICE void clear_beyond_solving(const Block& block, const Item& item, uint32_t short_turns) {
    device::mbarrier_wait_sleeping(block.barrier(kSolvingLanded), short_turns & 1, kPollNs);
    const auto tokens = static_cast<uint32_t>(item.span.tokens);
    clear_rows(block.tile(kErrors), tokens);
    clear_rows(block.tile(kValueGradients), tokens);
    device::fence_proxy_async();
    arrive_warp(block, uint32_t{kFull} + kErrors);
    arrive_warp(block, uint32_t{kFull} + kValueGradients);
}

/// dV lies where Z did, which TMA loads again.
HCP_DEVICE void store_value_gradients(const GradientsParams& p, const Block& block) {
    uint32_t short_turns = 0;
#pragma unroll 1
    for (uint32_t i = 0; has_item(block, i); ++i) {
#pragma unroll 1
        for (uint32_t member = 0; member < block.group; ++member) {
            const Turn turn = turn_of(block, i, member);
            wait_gates(block, turn);
            const Item item = served_item(block, turn);
            const int32_t head = head_of(block, item.key_head, member);
            if (item.span.tokens < kChunkTokens) {
                clear_beyond_solving(block, item, short_turns++);
            }
            device::mbarrier_wait_sleeping(block.barrier(kValueGradientsReady), turn.parity(),
                                           kPollNs);
            const uint32_t tile = block.tile(kValueGradients);
            if (item.span.tokens < kChunkTokens) {
                store_short_panel(p.dv, tile, item.span, head, 0);
                store_short_panel(p.dv, tile + kPanelBytes, item.span, head, 1);
            } else if (device::lane_index() == 0) {
                device::tensor_store(&p.dv.map, tile, {0, item.span.token, 2 * head}, kRowsBytes);
                device::bulk_commit();
                device::bulk_wait_read<0>();
            }
            release(block, kValueGradients);
            arrive_warp(block, kGatesEmpty + turn.parity());
        }
    }
    device::bulk_wait<0>();
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients
