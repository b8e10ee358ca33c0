#pragma once

// The warpgroup of the gradients kernel that makes dk^ = dec (D dH'^T) - gamma (dE H^T) + dP^T q^ +
// (dN + dN^T) k^, with dP and dN from the other two.

#include "kernels/gdn/cuda/gradients_products.cuh"
#include "kernels/gdn/cuda/gradients_rows.cuh"

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

/// Adds dec (D dH'^T); returns its products with k^ by row.
HCP_DEVICE device::Float2 add_writes(
    const Block& block, const Turn& turn, const Place& at, device::Float2 norm, float (&dk)[64]) {
    float part[64];
    wait_full(block, turn, kStateGradient);
    wait_ready(block, turn, kSolvedReady);
    multiply_state(part, block.shared + kSolved, block.tile(kStateGradient));
    finish(part);
    arrive_warp(block, kSolvedEmpty);
    const device::Float2 to_end = rows_at(block.slot(turn.index) + kToEnd * kVectorBytes, at);
    const device::Float2 dot = dot_rows(part, block.tile(kKeys), at);
    add_scaled<0>(dk, part, to_end);
    return {norm.x * to_end.x * dot.x, norm.y * to_end.y * dot.y};
}

/// Adds -gamma (dE H^T); returns its products with k^ by row.
HCP_DEVICE device::Float2 add_erasures(
    const Block& block, const Turn& turn, const Place& at, device::Float2 norm, float (&dk)[64]) {
    const uint32_t slot = block.slot(turn.index);
    float part[64];
    wait_ready(block, turn, kAdjointReady);
    multiply_state(part, block.shared + kAdjoint, block.tile(kState));
    finish(part);
    release(block, kState);
    arrive_warp(block, kAdjointEmpty);
    const device::Float2 gamma = rows_at(slot + kGamma * kVectorBytes, at);
    const device::Float2 beta = rows_at(slot + kBeta * kVectorBytes, at);
    const device::Float2 factor = {-gamma.x * beta.x, -gamma.y * beta.y};
    const device::Float2 dot = dot_rows(part, block.tile(kKeys), at);
    add_scaled<0>(dk, part, factor);
    return {norm.x * factor.x * dot.x, norm.y * factor.y * dot.y};
}

HCP_DEVICE void keys_of_turn(const Block& block,
                             const Turn& turn,
                             const Place& at,
                             float (&dk)[64]) {
    wait_gates(block, turn);
    wait_full(block, turn, kKeys);
    const device::Float2 norm = rows_at(block.slot(turn.index) + kKeyNorm * kVectorBytes, at);
    const device::Float2 writes = add_writes(block, turn, at, norm, dk);
    wait_full(block, turn, kState);
    const float through_state = multiply_states(block, at);
    release(block, kStateGradient);
    const device::Float2 erasures = add_erasures(block, turn, at, norm, dk);
    wait_free(block, turn, kSumsEmpty);
    store_rows(block.shared + kThroughWrites, at, writes);
    store_rows(block.shared + kThroughErasures, at, erasures);
    if (device::lane_index() == 0) {
        device::store_shared(block.shared + kThroughState + 4 * at.warp, through_state);
    }
    arrive_warp(block, kSumsFull);
}

HCP_DEVICE void gradients_of_keys(const GradientsParams& p, const Block& block, uint32_t item) {
    const Place at = place();
    float dk[64] = {};
#pragma unroll 1
    for (uint32_t member = 0; member < block.group; ++member) {
        const Turn turn = turn_of(block, item, member);
        keys_of_turn(block, turn, at, dk);
        if (member + 1 < block.group) {
            arrive_warp(block, kGatesEmpty + turn.parity());
        }
    }
    const Turn last = turn_of(block, item, block.group - 1);
    wait_full(block, last, kQueries);
    uint32_t rows[8][4];
    device::mbarrier_wait(block.barrier(kErasePairsReady), last.item_parity());
    multiply_square(dk, block.shared + kErasePairs, block.tile(kKeys));
    device::mbarrier_wait(block.barrier(kReadPairsReady), last.item_parity());
    multiply_transposed(dk, block.shared + kReadPairs, block.tile(kQueries));
    load_rows_of_warp(block.tile(kKeys), at, rows);
    finish(dk);
    release(block, kKeys);
    release(block, kQueries);
    arrive_warp(block, kErasePairsEmpty);
    finish_rows(p, block, last, at, kKeyNorm, rows, dk);
    // The rows leave through the space of dP.
    device::barrier_sync(kPairsRead, 128);
    store_rows_of(p, block, last, at, p.dk, block.shared + kReadPairs + at.warp * kBlockBytes, dk);
    arrive_warp(block, kReadPairsEmpty);
    arrive_warp(block, kGatesEmpty + last.parity());
}

}  // namespace hybridcp::gdn::cuda::gradients
