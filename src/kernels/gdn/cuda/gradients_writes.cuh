#pragma once

// The warpgroup of the gradients kernel that makes D and the part of dk^ that comes from what the
// chunk writes: dec (D dH'^T) + dP^T q^ + dN^T k^.

#include "kernels/gdn/cuda/gradients_group.cuh"
#include "kernels/gdn/cuda/gradients_products.cuh"

namespace hybridcp::gdn::cuda::gradients {

/// The warp's part of <dH', H>: the diagonal of H^T-rows times dH'^T-rows.
HCP_DEVICE float multiply_states(const Block& block, const Place& at) {
    float pairs[32];
    device::wgmma_fence();
#pragma unroll
    for (uint32_t step = 0; step < 16; ++step) {
        device::wgmma_shared<device::Major::kK, device::Major::kK>(
            pairs, columns_descriptor(block.tile(kState), step),
            columns_descriptor(block.tile(kStateGradient), step), step > 0);
    }
    device::wgmma_commit();
    finish(pairs);
    float sum = 0.0F;
#pragma unroll
    for (uint32_t step = 0; step < 4; ++step) {
        if (step == at.warp) {
            for (uint32_t i = 8 * step; i < 8 * step + 8; ++i) {
                const uint32_t column = i / 4 * 8 + at.pair + i % 2;
                sum += column == at.row + i / 2 % 2 * 8 ? pairs[i] : 0.0F;
            }
        }
    }
    for (uint32_t distance = 16; distance > 0; distance >>= 1) {
        sum += device::shuffle_xor(sum, distance);
    }
    return sum;
}

/// D, for the others in shared memory and as operand A.
HCP_DEVICE void solve(const Block& block,
                      const Item& item,
                      const Place& at,
                      uint32_t (&solved)[8][4]) {
    wait_full(block, item, kInverse);
    uint32_t inverse[4][4];
    load_inverse(inverse, block.tile(kInverse), block.slot(item.turn) + kBeta * kVectorBytes, at);
    wait_full(block, item, kErrors);
    float sums[64];
    multiply(sums, inverse, block.tile(kErrors), false);
    finish(sums);
    release(block, kInverse);
    release(block, kErrors);
    pack_operand(solved, sums);
    device::mbarrier_wait(block.barrier(kWritesPartEmpty), item.parity() ^ 1);
#pragma unroll
    for (uint32_t step = 0; step < 8; ++step) {
        device::store_matrix(block_address(block.shared + kSolved, 16 * at.warp, 16 * step),
                             solved[step]);
    }
    publish_warp(block, kSolvedReady);
}

HCP_DEVICE void gradients_of_writes(const GradientsParams&, const Block& block, const Item& item) {
    const Place at = place();
    const uint32_t slot = block.slot(item.turn);
    uint32_t solved[8][4];
    solve(block, item, at, solved);
    float dk[64];
    wait_full(block, item, kStateGradient);
    multiply(dk, solved, block.tile(kStateGradient), false);
    finish(dk);
    scale_rows(dk, rows_at(slot + kToEnd * kVectorBytes, at));
    wait_full(block, item, kState);
    const float through_state = multiply_states(block, at);
    release(block, kState);
    release(block, kStateGradient);
    wait_full(block, item, kKeys);
    const device::Float2 dot = dot_rows(dk, block.tile(kKeys), at);
    const device::Float2 r_k = rows_at(slot + kKeyNorm * kVectorBytes, at);
    device::mbarrier_wait(block.barrier(kSumsEmpty), item.parity() ^ 1);
    store_rows(block.shared + kThroughWrites, at, {r_k.x * dot.x, r_k.y * dot.y});
    if (device::lane_index() == 0) {
        device::store_shared(block.shared + kThroughState + 4 * at.warp, through_state);
    }
    arrive_warp(block, kSumsFull);

    wait_full(block, item, kQueries);
    device::mbarrier_wait(block.barrier(kReadPairsReady), item.parity());
    multiply_transposed(dk, block.shared + kReadPairs, block.tile(kQueries));
    device::mbarrier_wait(block.barrier(kErasePairsReady), item.parity());
    multiply_transposed(dk, block.shared + kErasePairs, block.tile(kKeys));
    finish(dk);
    release(block, kKeys);
    release(block, kQueries);
    arrive_warp(block, kGatesEmpty + item.parity());
    // The part takes the place of what the other warps' products read.
    device::barrier_sync(kWritesDone, 128);
    store_writes_part(block, at, dk);
    arrive_warp(block, kWritesPartFull);
}

}  // namespace hybridcp::gdn::cuda::gradients
