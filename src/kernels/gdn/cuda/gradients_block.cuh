#pragma once

// Where a warp of the gradients kernel is: its block, its chunk, and whom it waits for.

#include "kernels/gdn/cuda/gradients_layout.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients {

/// This block and its items: chunks of a key head, each with the turns of `group` value heads.
struct Block {
    uint32_t shared;
    uint32_t group;
    uint32_t first_item, item_step, num_items;

    HCP_DEVICE uint32_t items() const {
        return (num_items - first_item + item_step - 1) / item_step;
    }
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

/// One value head of an item. `item` and `index` count those of this block.
struct Turn {
    uint32_t item, member, index;
    HCP_DEVICE uint32_t parity() const { return index & 1; }
    HCP_DEVICE uint32_t item_parity() const { return item & 1; }
};
HCP_DEVICE Turn turn_of(const Block& block, uint32_t item, uint32_t member) {
    return {item, member, item * block.group + member};
}

struct Item {
    int32_t chunk, key_head;
    Chunk span;
};
HCP_DEVICE int32_t head_of(const Block& block, int32_t key_head, uint32_t member) {
    return key_head * static_cast<int32_t>(block.group) + static_cast<int32_t>(member);
}

/// Key heads first: blocks that run at once read whole rows of q and k.
HCP_DEVICE Item item_of(const GradientsParams& p, const Block& block, uint32_t item) {
    const auto key_heads = static_cast<uint32_t>(p.shape.key_heads);
    const uint32_t index = block.first_item + item * block.item_step;
    const auto chunk = static_cast<int32_t>(index / key_heads);
    return {chunk, static_cast<int32_t>(index % key_heads), device::load_global(p.chunks + chunk)};
}

HCP_DEVICE void wait_gates(const Block& block, const Turn& turn) {
    device::mbarrier_wait(block.barrier(kGatesFull + turn.parity()), (turn.index >> 1) & 1);
}
/// One of the turn's powers of two (kPowers); 1 of operands in bf16.
HCP_DEVICE float power_at(const Block& block, const Turn& turn, uint32_t power) {
    return kFp16 ? device::load_shared<float>(block.slot(turn.index) + power) : 1.0F;
}
/// The item as the gates' warp left it with the turn's gates. The chunk's number is not known.
HCP_DEVICE Item served_item(const Block& block, const Turn& turn) {
    const auto words = device::load_shared<device::Word4>(block.slot(turn.index) + kItem);
    return {-1,
            static_cast<int32_t>(words.z),
            {static_cast<int32_t>(words.x), static_cast<int32_t>(words.y)}};
}

/// Between polls of the warps that do not multiply.
constexpr uint32_t kPollNs = 40;

HCP_DEVICE void wait_full(const Block& block, const Turn& turn, Tile tile) {
    const bool of_item = tile == kKeys || tile == kQueries;
    device::mbarrier_wait(block.full(tile), of_item ? turn.item_parity() : turn.parity());
}
/// For what another warpgroup makes once a turn, and for the space to make it in.
HCP_DEVICE void wait_ready(const Block& block, const Turn& turn, Barrier barrier) {
    device::mbarrier_wait(block.barrier(barrier), turn.parity());
}
HCP_DEVICE void wait_free(const Block& block, const Turn& turn, Barrier barrier) {
    device::mbarrier_wait(block.barrier(barrier), turn.parity() ^ 1);
}

/// Counts this warp in at a barrier, after all its lanes.
HCP_DEVICE void arrive_warp(const Block& block, uint32_t barrier) {
    device::arrive_warp(block.barrier(barrier));
}
/// The same for what wgmma will read.
HCP_DEVICE void publish_warp(const Block& block, uint32_t barrier) {
    device::fence_proxy_async();
    arrive_warp(block, barrier);
}
/// After loads of the tile that are not wgmma's comes fence_proxy_async first: without it TMA was
/// seen to overtake a load_matrix under way.
HCP_DEVICE void release(const Block& block, Tile tile) {
    arrive_warp(block, uint32_t{kEmpty} + tile);
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients
