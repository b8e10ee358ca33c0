#pragma once

// dq, dk, dv, dg and dbeta of Gated DeltaNet from what the other kernels left (docs/gdn-cuda.md):
// all chunks and heads at once. A block has one value head of a chunk at a time, a cluster the
// `group` value heads of a key head; clusters take chunks x key heads in strides. Three warpgroups
// multiply, one loads and stores dv: tiles have one buffer each, which the next chunk's load takes
// as soon as the last reader has released it.

#include "kernels/gdn/cuda/gradients_erasures.cuh"
#include "kernels/gdn/cuda/gradients_gates.cuh"
#include "kernels/gdn/cuda/gradients_producer.cuh"
#include "kernels/gdn/cuda/gradients_reads.cuh"
#include "kernels/gdn/cuda/gradients_values.cuh"
#include "kernels/gdn/cuda/gradients_writes.cuh"

namespace hybridcp::gdn::cuda {

/// Launch: cluster of `group` blocks, a grid of at most num_chunks x key_heads clusters.
struct GradientsConfig {
    static constexpr int kThreads = 512;
    static constexpr uint32_t kSharedBytes = gradients::kSharedBytes;
    static constexpr int kWritesRegisters = 152, kErasuresRegisters = 160, kReadsRegisters = 152;
    static constexpr int kLoadingRegisters = 48;
};

namespace gradients {

HCP_DEVICE void init_barriers(const Block& block) {
    constexpr uint32_t kWarps = kWorkingThreads / 32;
    const auto init = [&block](uint32_t barrier, uint32_t arrivals) {
        device::mbarrier_init(block.barrier(barrier), arrivals);
    };
    for (uint32_t tile = 0; tile < kTiles; ++tile) {
        init(kFull + tile, 1);
        init(kEmpty + tile, tile_readers(tile));
    }
    init(kLanded, 1);
    for (uint32_t slot = 0; slot < 2; ++slot) {
        init(kGatesFull + slot, 1);
        init(kGatesEmpty + slot, kWarps + kValueWarps);
    }
    init(kValueGradientsReady, 4);
    init(kSolvedReady, 4);
    init(kReadPairsReady, 4);
    init(kErasePairsReady, 4);
    init(kSumsFull, kWarps);
    init(kSumsEmpty, 1);
    init(kWritesPartFull, 4);
    init(kWritesPartEmpty, 4);
    for (uint32_t i = 0; i < 8; ++i) {
        init(kReceivedFull + i, 1);
        init(kReceivedEmpty + i, block.group > 1 ? block.group - 1 : 1);
    }
    device::fence_mbarrier_init();
}

/// Calls role(params, block, item) for each of the block's items.
template <class Role>
HCP_DEVICE void for_each_item(const GradientsParams& p, const Block& block, Role role) {
    const uint32_t turns =
        (block.num_items - block.first_item + block.item_step - 1) / block.item_step;
    for (uint32_t turn = 0; turn < turns; ++turn) {
        role(p, block, served_item(block, turn));
    }
}

/// Group: known to the compiler, or 0.
template <class Config, uint32_t Group>
HCP_DEVICE void work(const GradientsParams& p, Block block) {
    block.group = Group > 0 ? Group : block.group;
    const uint32_t warpgroup = device::warp_index() / 4;
    if (warpgroup == 3) {
        device::decrease_registers<Config::kLoadingRegisters>();
        if (device::warp_index() == 12) {
            load_tiles(p, block);
        } else if (device::warp_index() == 13) {
            serve_gates(p, block);
        } else {
            const uint32_t half = device::warp_index() - 14;
            for_each_item(p, block, [half](const auto&... x) { store_value_gradient(x..., half); });
        }
    } else if (warpgroup == 0) {
        device::increase_registers<Config::kWritesRegisters>();
        for_each_item(p, block, [](const auto&... x) { gradients_of_writes(x...); });
    } else if (warpgroup == 1) {
        device::increase_registers<Config::kErasuresRegisters>();
        for_each_item(p, block, [](const auto&... x) { gradients_of_erasures(x...); });
    } else {
        device::increase_registers<Config::kReadsRegisters>();
        for_each_item(p, block, [](const auto&... x) { gradients_of_reads(x...); });
    }
}

}  // namespace gradients

template <class Config>
HCP_DEVICE void gradients_kernel(const GradientsParams& p) {
    const auto group = static_cast<uint32_t>(p.shape.group());
    const gradients::Block block = {
        device::shared_base(),
        group,
        device::cluster_rank(),
        device::block_index() / group,
        device::grid_blocks() / group,
        static_cast<uint32_t>(p.shape.num_chunks) * static_cast<uint32_t>(p.shape.key_heads)};
    if (device::thread_index() == 0) {
        gradients::init_barriers(block);
    }
    device::sync_block();
    device::cluster_arrive();
    device::cluster_wait();
    if (group == 1) {
        gradients::work<Config, 1>(p, block);
    } else if (group == 2) {
        gradients::work<Config, 2>(p, block);
    } else if (group == 4) {
        gradients::work<Config, 4>(p, block);
    } else {
        gradients::work<Config, 0>(p, block);
    }
    // Nobody leaves while another block may arrive at its barriers.
    device::cluster_arrive();
    device::cluster_wait();
}

#ifdef __CUDACC__
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gradients_entry(const __grid_constant__ GradientsParams p) {
    gradients_kernel<Config>(p);
}
#endif

}  // namespace hybridcp::gdn::cuda
