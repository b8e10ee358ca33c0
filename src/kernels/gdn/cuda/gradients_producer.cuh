#pragma once

// The two warps of the gradients kernel that load tiles: one what D and dR are made from, the other
// the rest, so that neither waits for the other's tiles to be released.

#include "kernels/gdn/cuda/gradients_block.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients {

HCP_DEVICE void wait_empty(const Block& block, uint32_t parity, Tile tile) {
    device::mbarrier_wait_sleeping(block.empty(tile), parity ^ 1, kPollNs);
}

HCP_DEVICE void load_image(
    const Block& block, const Turn& turn, Tile tile, const uint8_t* images, int64_t image) {
    wait_empty(block, turn.parity(), tile);
    const uint32_t bytes = tile_bytes(tile);
    device::mbarrier_arrive_expect(block.full(tile), bytes);
    device::bulk_load(block.tile(tile), images + image * bytes, bytes, block.full(tile));
}

/// Rows of one head, which has been waited for. A short chunk's complete together on a barrier of
/// their own.
HCP_DEVICE void load_rows(
    const Block& block, Chunk span, Tile tile, const device::TensorMap* map, int32_t head) {
    const bool whole = span.tokens == kChunkTokens;
    const uint32_t barrier = whole ? block.full(tile) : block.barrier(kLanded);
    if (whole) {
        device::mbarrier_arrive_expect(barrier, kRowsBytes);
    } else {
        device::mbarrier_expect(barrier, kRowsBytes);
    }
    for (int32_t half = 0; half < 2; ++half) {
        device::tensor_load(block.tile(tile) + static_cast<uint32_t>(half) * kPanelBytes, map,
                            barrier, {64 * half, head, span.token});
    }
}

HCP_DEVICE int64_t image_of(const GradientsParams& p,
                            const Block& block,
                            const Item& item,
                            const Turn& turn) {
    return int64_t{head_of(block, item.key_head, turn.member)} * p.shape.num_chunks + item.chunk;
}

/// T, E and Z, by one thread.
HCP_DEVICE void load_solving(const GradientsParams& p, const Block& block, uint32_t items) {
#pragma unroll 1
    for (uint32_t i = 0; i < items; ++i) {
        const Item item = item_of(p, block, i);
#pragma unroll 1
        for (uint32_t member = 0; member < block.group; ++member) {
            const Turn turn = turn_of(block, i, member);
            const int64_t image = image_of(p, block, item, turn);
            load_image(block, turn, kInverse, p.inverse, image);
            load_image(block, turn, kErrors, p.e, image);
            load_image(block, turn, kValueGradients, p.z, image);
        }
    }
}

/// The other tiles of a turn by one thread, in the order in which the last turn's are released.
HCP_DEVICE void load_turn(const GradientsParams& p,
                          const Block& block,
                          const Item& item,
                          const Turn& turn) {
    const int64_t image = image_of(p, block, item, turn);
    load_image(block, turn, kStateGradient, p.state_gradient, image);
    load_image(block, turn, kState, p.state, image);
    wait_empty(block, turn.parity(), kOutputGradients);
    if (p.has_d_o) {
        load_rows(block, item.span, kOutputGradients, &p.d_o,
                  head_of(block, item.key_head, turn.member));
    }
    if (turn.member == 0) {
        wait_empty(block, turn.item_parity(), kQueries);
        load_rows(block, item.span, kQueries, &p.q, item.key_head);
        wait_empty(block, turn.item_parity(), kKeys);
        load_rows(block, item.span, kKeys, &p.k, item.key_head);
    }
    if (item.span.tokens < kChunkTokens) {
        device::mbarrier_arrive(block.barrier(kLanded));
    }
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

/// Zeros for the tokens beyond a short chunk, once its loads have landed.
HCP_DEVICE void clear_beyond(const Block& block,
                             const Item& item,
                             const Turn& turn,
                             uint32_t short_turns) {
    device::mbarrier_wait_sleeping(block.barrier(kLanded), short_turns & 1, kPollNs);
    const auto tokens = static_cast<uint32_t>(item.span.tokens);
    clear_rows(block.tile(kOutputGradients), tokens);
    if (turn.member == 0) {
        clear_rows(block.tile(kKeys), tokens);
        clear_rows(block.tile(kQueries), tokens);
    }
    device::fence_proxy_async();
    device::sync_warp();
}

/// dH', H, dO, Q and K, by a warp.
HCP_DEVICE void load_others(const GradientsParams& p, const Block& block) {
    uint32_t short_turns = 0;
    if (!p.has_d_o) {
        clear_rows(block.tile(kOutputGradients), 0);
        device::fence_proxy_async();
    }
#pragma unroll 1
    for (uint32_t i = 0; i < block.items(); ++i) {
        const Item item = item_of(p, block, i);
        const bool is_short = item.span.tokens < kChunkTokens;
#pragma unroll 1
        for (uint32_t member = 0; member < block.group; ++member) {
            const Turn turn = turn_of(block, i, member);
            if (device::lane_index() == 0) {
                load_turn(p, block, item, turn);
            }
            device::sync_warp();
            if (is_short) {
                clear_beyond(block, item, turn, short_turns++);
            }
            if (device::arrives_for_warp()) {
                if (is_short && member == 0) {
                    device::mbarrier_arrive(block.full(kKeys));
                    device::mbarrier_arrive(block.full(kQueries));
                }
                if (is_short || !p.has_d_o) {
                    device::mbarrier_arrive(block.full(kOutputGradients));
                }
            }
            if (!is_short && member == 0) {
                device::arrive_beside_copy(block.full(kKeys));
                device::arrive_beside_copy(block.full(kQueries));
            }
            if (!is_short && p.has_d_o) {
                device::arrive_beside_copy(block.full(kOutputGradients));
            }
        }
    }
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients
