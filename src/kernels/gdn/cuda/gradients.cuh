#pragma once

// dq, dk, dv, dg and dbeta of Gated DeltaNet from what the other kernels left (docs/gdn-cuda.md):
// all chunks and heads at once. An item is a chunk of a key head, whose value heads a block takes
// in turn: dq^ and dk^ stay in its registers over them. Blocks take items in strides. Three
// warpgroups multiply, one loads and stores dv: tiles have one buffer each, which the next turn's
// load takes as soon as the last reader has released it.

#include "kernels/gdn/cuda/gradients_gates.cuh"
#include "kernels/gdn/cuda/gradients_item.cuh"
#include "kernels/gdn/cuda/gradients_producer.cuh"
#include "kernels/gdn/cuda/gradients_values.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

/// Launch: a grid of at most num_chunks x key_heads blocks.
struct GradientsConfig {
    static constexpr int kThreads = 512;
    static constexpr uint32_t kSharedBytes = gradients::kSharedBytes;
    static constexpr int kWorkingRegisters = 160, kLoadingRegisters = 32;
    static_assert(3 * kWorkingRegisters + kLoadingRegisters <= 512);
};

namespace gradients {

HCP_DEVICE void init_barriers(const Block& block) {
    constexpr uint32_t kWarps = kWorkingThreads / 32;
    const auto warps = [](uint32_t count) { return device::warp_arrivals(count); };
    const auto init = [&block](uint32_t barrier, uint32_t arrivals) {
        device::mbarrier_init(block.barrier(barrier), arrivals);
    };
    for (uint32_t tile = 0; tile < kTiles; ++tile) {
        const bool is_image = tile == kInverse || tile == kStateGradient || tile == kState;
        init(kFull + tile, is_image ? 1 : warps(1));  // the others may be cleared
        init(kEmpty + tile, warps(tile_readers(tile)));
    }
    init(kLanded, 1);
    init(kSolvingLanded, 1);
    for (uint32_t slot = 0; slot < 2; ++slot) {
        init(kGatesFull + slot, warps(1));
        init(kGatesEmpty + slot, warps(kWarps + 1));
    }
    init(kValueGradientsReady, warps(4));
    init(kSolvedReady, warps(4));
    init(kSolvedEmpty, warps(kWarps));
    init(kAdjointReady, warps(4));
    init(kAdjointEmpty, warps(8));
    init(kReadPairsReady, warps(4));
    init(kReadPairsEmpty, warps(4));
    init(kErasePairsReady, warps(4));
    init(kErasePairsEmpty, warps(4));
    init(kSumsFull, warps(kWarps));
    init(kSumsEmpty, warps(1));
    for (uint32_t stage = 0; stage < kItemStages; ++stage) {
        init(kItemFull + stage, 1);
    }
    device::fence_mbarrier_init();
}

/// The warps that do not multiply.
HCP_DEVICE void serve(const GradientsParams& p, const Block& block) {
    const uint32_t warp = device::warp_index() % 4;
    if (warp == 0) {
        if (device::lane_index() == 0) {
            load_solving(p, block);
        }
    } else if (warp == 1) {
        serve_gates(p, block);
    } else if (warp == 2) {
        store_value_gradients(p, block);
    } else {
        load_others(p, block);
    }
}

}  // namespace gradients

template <class Config>
HCP_DEVICE void gradients_kernel(const GradientsParams& p) {
    using namespace gradients;  // NOLINT(google-build-using-namespace)
    const Block block = {device::shared_base(), static_cast<uint32_t>(p.shape.group())};
    if (device::thread_index() == 0) {
        init_barriers(block);
    }
    device::sync_block();
    if (device::warp_index() >= kWorkingThreads / 32) {
        device::decrease_registers<Config::kLoadingRegisters>();
        serve(p, block);
    } else {
        device::increase_registers<Config::kWorkingRegisters>();
#pragma unroll 1
        for (uint32_t item = 0; has_item(block, item); ++item) {
            take_item(p, block, item);
        }
    }
    if (device::thread_index() ==
        Config::kThreads - 1) {  // by all, kernels were not seen to overlap
        device::wait_for_prerequisites();
    }
}

#ifdef __CUDACC__
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gradients_entry(const __grid_constant__ GradientsParams p) {
    gradients_kernel<Config>(p);
}
#endif

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
