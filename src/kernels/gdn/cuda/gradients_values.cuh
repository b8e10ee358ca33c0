#pragma once

// The warps of the gradients kernel that store dv.

#include "kernels/gdn/cuda/gradients_fragments.cuh"

namespace hybridcp::gdn::cuda::gradients {

constexpr uint32_t kValueWarps = 2;

/// Half of the rows, by warp `half` of the two. Tiles take turns with Z, which TMA loads.
HCP_DEVICE void store_value_gradient(const GradientsParams& p,
                                     const Block& block,
                                     const Item& item,
                                     uint32_t half) {
    const uint32_t tile = block.tile(kValueGradients), lane = device::lane_index();
    const int64_t row_elements = p.shape.value_row();
    const uint32_t first = 32 * half + lane / 16, column = lane % 16 * 8;
    uint16_t* to = p.dv + (item.span.token + int64_t{first}) * row_elements +
                   int64_t{item.head} * kHeadDim + column;
    device::mbarrier_wait_sleeping(block.barrier(kValueGradientsReady), item.parity(), kPollNs);
#pragma unroll 4
    for (uint32_t i = 0; i < 32; i += 2) {
        const auto words = device::load_shared<device::Word4>(element(tile, first + i, column));
        if (static_cast<int32_t>(first + i) < item.span.tokens) {
            device::store_global(reinterpret_cast<device::Word4*>(to + i * row_elements), words);
        }
    }
    device::fence_proxy_async();
    release(block, kValueGradients);
    arrive_warp(block, kGatesEmpty + item.parity());
}

}  // namespace hybridcp::gdn::cuda::gradients
