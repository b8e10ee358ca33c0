#pragma once

// Where a warp of the gradients kernel is: its block, its chunk, and whom it waits for.

#include "kernels/gdn/cuda/gradients_layout.cuh"

namespace hybridcp::gdn::cuda::gradients {

/// This block among those of its cluster, and its chunks.
struct Block {
    uint32_t shared;
    uint32_t group, rank;
    uint32_t first_item, item_step, num_items;

    HCP_DEVICE uint32_t tile(Tile tile) const { return shared + tile_offset(tile); }
    HCP_DEVICE uint32_t barrier(uint32_t barrier) const {
        return shared + kBarrierSpace + 8 * barrier;
    }
    HCP_DEVICE uint32_t full(uint32_t tile) const { return barrier(kFull + tile); }
    HCP_DEVICE uint32_t empty(uint32_t tile) const { return barrier(kEmpty + tile); }
    HCP_DEVICE uint32_t slot(uint32_t turn) const {
        return shared + kSlots + (turn & 1) * kSlotBytes;
    }
};

/// One chunk of one key head; `turn` counts those of this block.
struct Item {
    uint32_t turn;
    int32_t chunk, key_head, head;
    Chunk span;
    HCP_DEVICE uint32_t parity() const { return turn & 1; }
    HCP_DEVICE int64_t image(const Shape& shape) const {
        return int64_t{head} * shape.num_chunks + chunk;
    }
};

/// Key heads first: blocks that run at once read whole rows of q and k.
HCP_DEVICE Item item_of(const GradientsParams& p,
                        const Block& block,
                        uint32_t item,
                        uint32_t turn) {
    Item found;
    const auto key_heads = static_cast<uint32_t>(p.shape.key_heads);
    found.turn = turn;
    found.chunk = static_cast<int32_t>(item / key_heads);
    found.key_head = static_cast<int32_t>(item % key_heads);
    found.head = static_cast<int32_t>(item % key_heads * block.group + block.rank);
    found.span = device::load_global(p.chunks + found.chunk);
    return found;
}

HCP_DEVICE void wait_gates(const Block& block, uint32_t turn) {
    device::mbarrier_wait(block.barrier(kGatesFull + (turn & 1)), (turn >> 1) & 1);
}
/// The item as the gates' warp left it. The chunk's number is not known.
HCP_DEVICE Item served_item(const Block& block, uint32_t turn) {
    wait_gates(block, turn);
    const auto words = device::load_shared<device::Word4>(block.slot(turn) + kItem);
    const auto key_head = static_cast<int32_t>(words.z);
    return {turn,
            -1,
            key_head,
            key_head * static_cast<int32_t>(block.group) + static_cast<int32_t>(block.rank),
            {static_cast<int32_t>(words.x), static_cast<int32_t>(words.y)}};
}

/// Between polls of the warps that do not multiply.
constexpr uint32_t kPollNs = 40;

HCP_DEVICE void wait_full(const Block& block, const Item& item, Tile tile) {
    device::mbarrier_wait(block.full(tile), item.parity());
}

/// Counts this warp in at a barrier, after all its lanes.
HCP_DEVICE void arrive_warp(const Block& block, uint32_t barrier) {
    device::sync_warp();
    if (device::lane_index() == 0) {
        device::mbarrier_arrive(block.barrier(barrier));
    }
}
/// The same for what wgmma will read.
HCP_DEVICE void publish_warp(const Block& block, uint32_t barrier) {
    device::fence_proxy_async();
    arrive_warp(block, barrier);
}
HCP_DEVICE void release(const Block& block, Tile tile) {
    arrive_warp(block, uint32_t{kEmpty} + tile);
}

}  // namespace hybridcp::gdn::cuda::gradients
