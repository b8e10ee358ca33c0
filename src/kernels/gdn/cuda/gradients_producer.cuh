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
HCP_DEVICE void load_rows(const Block& block,
                          Chunk span,
                          Tile tile,
                          const device::TensorMap* map,
                          int32_t head,
                          Barrier landed = kLanded) {
    const bool whole = span.tokens == kChunkTokens;
    const uint32_t barrier = whole ? block.full(tile) : block.barrier(landed);
    if (whole) {
        device::mbarrier_arrive_expect(barrier, kRowsBytes);
    } else {
        device::mbarrier_expect(barrier, kRowsBytes);
    }
    device::tensor_load(block.tile(tile), map, barrier, {0, span.token, 2 * head});
}

HCP_DEVICE int64_t image_of(const GradientsParams& p,
                            const Block& block,
                            const Item& item,
                            const Turn& turn) {
    return int64_t{head_of(block, item.key_head, turn.member)} * p.shape.num_chunks + item.chunk;
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

/// T, E and Z of a turn by one thread.
HCP_DEVICE void load_solving_of(const GradientsParams& p,
                                const Block& block,
                                const Item& item,
                                const Turn& turn) {
    load_image(block, turn, kInverse, p.inverse, image_of(p, block, item, turn));
    wait_empty(block, turn.parity(), kErrors);
    const ErrorPlace place(item.key_head, static_cast<int32_t>(turn.member),
                           static_cast<int32_t>(block.group));
    load_rows(block, item.span, kErrors, &p.errors[place.index], place.head, kSolvingLanded);
    wait_empty(block, turn.parity(), kValueGradients);
    load_rows(block, item.span, kValueGradients, &p.dv.map,
              head_of(block, item.key_head, turn.member), kSolvingLanded);
    if (item.span.tokens < kChunkTokens) {
        device::mbarrier_arrive(block.barrier(kSolvingLanded));
    } else {
        device::arrive_beside_copy_alone(block.full(kErrors));
        device::arrive_beside_copy_alone(block.full(kValueGradients));
    }
}
/// The number of an item that no other block has; by one thread.
HCP_DEVICE int32_t take_number(const GradientsParams& p) {
    const auto number = static_cast<int32_t>(device::atomic_add_global(p.progress.items, 1));
    return number < p.shape.num_chunks * p.shape.key_heads ? number : kNoItem;
}
/// Waits until the state gradient has left what an item needs.
HCP_DEVICE void wait_ready(const GradientsParams& p, const Block& block, const Item& item) {
    constexpr uint32_t kSleepNs = 100;
    for (uint32_t member = 0; member < block.group; ++member) {
        const uint32_t* ready =
            p.progress.ready + int64_t{head_of(block, item.key_head, member)} * p.shape.num_chunks +
            item.chunk;
        while (device::load_acquire_global(ready) < kHalves) {
            device::sleep_ns(kSleepNs);
        }
    }
    device::fence_proxy_async_global();
}
/// Hands an item to the block's warps. One that is about to be used as its stage again was read by
/// all: they are at most two items apart.
HCP_DEVICE void hand_out(const Block& block, uint32_t item, int32_t number) {
    const uint32_t stage = item % kItemStages;
    device::store_shared(block.shared + kItemNumbers + 4 * stage, number);
    device::mbarrier_arrive(block.barrier(kItemFull + stage));
}

/// Takes items, and loads T, E and Z. By one thread: a warp that meets in each turn took 2 %
/// longer. The warp that stores dv clears the rows beyond short chunks.
HCP_DEVICE void load_solving(const GradientsParams& p, const Block& block) {
    int32_t number = take_number(p);
    Item item = item_of(p, number);
    uint32_t i = 0;
#pragma unroll 1
    for (; number != kNoItem; ++i) {
        wait_ready(p, block, item);
        hand_out(block, i, number);
        number = take_number(p);  // ahead: it is far away
        const Item next = item_of(p, number);
#pragma unroll 1
        for (uint32_t member = 0; member < block.group; ++member) {
            load_solving_of(p, block, item, turn_of(block, i, member));
        }
        item = next;
    }
    hand_out(block, i, kNoItem);
}

/// dH', H, dO, Q and K, by a warp.
HCP_DEVICE void load_others(const GradientsParams& p, const Block& block) {
    uint32_t short_turns = 0;
    if (!p.has_d_o) {
        clear_rows(block.tile(kOutputGradients), 0);
        device::fence_proxy_async();
    }
#pragma unroll 1
    for (uint32_t i = 0;; ++i) {
        const Item item = wait_item(p, block, i);
        if (item.span.tokens == 0) {
            return;
        }
        const bool is_short = item.span.tokens < kChunkTokens;
#pragma unroll 1
        for (uint32_t member = 0; member < block.group; ++member) {
            const Turn turn = turn_of(block, i, member);
            if (device::lane_index() == 0) {
                device::fence_proxy_async_global();  // after the item, which is ready
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
