#pragma once

// The warp of the gradients kernel that loads tiles.

#include "kernels/gdn/cuda/gradients_block.cuh"

namespace hybridcp::gdn::cuda::gradients {

HCP_DEVICE void wait_empty(const Block& block, const Item& item, Tile tile) {
    device::mbarrier_wait_sleeping(block.empty(tile), item.parity() ^ 1, kPollNs);
}

HCP_DEVICE void load_image(const GradientsParams& p,
                           const Block& block,
                           const Item& item,
                           Tile tile,
                           const uint8_t* images) {
    wait_empty(block, item, tile);
    const uint32_t bytes = tile_bytes(tile);
    device::mbarrier_arrive_expect(block.full(tile), bytes);
    device::bulk_load(block.tile(tile), images + item.image(p.shape) * bytes, bytes,
                      block.full(tile));
}

/// Rows of one head. A short chunk's complete together on a barrier of their own.
HCP_DEVICE void load_rows(
    const Block& block, const Item& item, Tile tile, const device::TensorMap* map, int32_t head) {
    wait_empty(block, item, tile);
    const bool whole = item.span.tokens == kChunkTokens;
    const uint32_t barrier = whole ? block.full(tile) : block.barrier(kLanded);
    if (whole) {
        device::mbarrier_arrive_expect(barrier, kRowsBytes);
    } else {
        device::mbarrier_expect(barrier, kRowsBytes);
    }
    for (int32_t half = 0; half < 2; ++half) {
        device::tensor_load(block.tile(tile) + static_cast<uint32_t>(half) * kPanelBytes, map,
                            barrier, {64 * half, head, item.span.token});
    }
}

/// By one thread, in the order in which the last chunk's tiles are released.
HCP_DEVICE void load_item(const GradientsParams& p, const Block& block, const Item& item) {
    load_image(p, block, item, kInverse, p.inverse);
    load_image(p, block, item, kErrors, p.e);
    load_image(p, block, item, kValueGradients, p.z);
    load_image(p, block, item, kStateGradient, p.state_gradient);
    load_image(p, block, item, kState, p.state);
    if (p.has_d_o) {
        load_rows(block, item, kOutputGradients, &p.d_o, item.head);
    }
    load_rows(block, item, kKeys, &p.k, item.key_head);
    load_rows(block, item, kQueries, &p.q, item.key_head);
    if (item.span.tokens < kChunkTokens) {
        device::mbarrier_arrive(block.barrier(kLanded));
    }
}

/// Rows from `first` on, by a warp.
HCP_DEVICE void clear_rows(uint32_t tile, uint32_t first) {
    for (uint32_t i = 8 * first + device::lane_index(); i < 8 * kChunkTokens; i += 32) {
        for (uint32_t panel = 0; panel < 2; ++panel) {
            // Pieces of a row change places within it: no swizzle.
            device::store_shared(tile + panel * kPanelBytes + 16 * i, device::Word4{0, 0, 0, 0});
        }
    }
}

HCP_DEVICE void load_tiles(const GradientsParams& p, const Block& block) {
    uint32_t turn = 0, short_chunks = 0;
    if (!p.has_d_o) {
        clear_rows(block.tile(kOutputGradients), 0);
        device::fence_proxy_async();
    }
    for (uint32_t i = block.first_item; i < block.num_items; i += block.item_step, ++turn) {
        const Item item = item_of(p, block, i, turn);
        if (device::lane_index() == 0) {
            load_item(p, block, item);
        }
        device::sync_warp();
        const bool is_short = item.span.tokens < kChunkTokens;
        if (is_short) {
            device::mbarrier_wait_sleeping(block.barrier(kLanded), short_chunks++ & 1, kPollNs);
            const auto tokens = static_cast<uint32_t>(item.span.tokens);
            clear_rows(block.tile(kKeys), tokens);
            clear_rows(block.tile(kQueries), tokens);
            clear_rows(block.tile(kOutputGradients), tokens);
            device::fence_proxy_async();
            device::sync_warp();
        }
        if (device::lane_index() == 0) {
            if (is_short) {
                device::mbarrier_arrive(block.full(kKeys));
                device::mbarrier_arrive(block.full(kQueries));
            }
            if (is_short || !p.has_d_o) {
                device::mbarrier_arrive(block.full(kOutputGradients));
            }
        }
    }
}

}  // namespace hybridcp::gdn::cuda::gradients
