#pragma once

// Where a warp of the gradients kernel is: its block, its chunk, and whom it waits for.

#include "kernels/gdn/cuda/gradients_layout.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients {

/// Between polls of the warps that do not multiply.
constexpr uint32_t kPollNs = 40;

/// This block. Its items are chunks of a key head, each with the turns of `group` value heads.
struct Block {
    uint32_t shared;
    uint32_t group;

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

/// The number of no item: there are no more.
constexpr int32_t kNoItem = -1;

/// From the last chunk on, as the state gradient has them. Key heads first: blocks that run at once
/// read whole rows of q and k.
HCP_DEVICE Item item_of(const GradientsParams& p, int32_t number) {
    if (number == kNoItem) {
        return {};
    }
    const int32_t chunk = p.shape.num_chunks - 1 - number / p.shape.key_heads;
    return {chunk, number % p.shape.key_heads, device::load_global(p.chunks + chunk)};
}
/// An item of the block's; without tokens where there are no more.
HCP_DEVICE Item wait_item(const GradientsParams& p, const Block& block, uint32_t item) {
    const uint32_t stage = item % kItemStages;
    device::mbarrier_wait_sleeping(block.barrier(kItemFull + stage), item / kItemStages & 1,
                                   kPollNs);
    return item_of(p, device::load_shared<int32_t>(block.shared + kItemNumbers + 4 * stage));
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

HCP_DEVICE void wait_full(const Block& block, const Turn& turn, Tile tile) {
    const bool of_item = tile == kKeys || tile == kQueries;
    device::mbarrier_wait(block.full(tile), of_item ? turn.item_parity() : turn.parity());
}
/// Whether the block has an item of this number.
HCP_DEVICE bool has_item(const Block& block, uint32_t item) {
    const Turn first = turn_of(block, item, 0);
    wait_gates(block, first);
    return served_item(block, first).span.tokens > 0;
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

/// Rows from `first` on, by a warp.
HCP_DEVICE void clear_rows(uint32_t tile, uint32_t first) {
#pragma unroll 1
    for (uint32_t i = 8 * first + device::lane_index(); i < 8 * kChunkTokens; i += 32) {
        for (uint32_t panel = 0; panel < 2; ++panel) {
            // Pieces of a row change places within it: no swizzle.
            device::store_shared(tile + panel * kPanelBytes + 16 * i, device::Word4{0, 0, 0, 0});
        }
    }
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients
