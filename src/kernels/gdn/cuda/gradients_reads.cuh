#pragma once

// The warpgroup of the gradients kernel that makes dP and dq^ = s gamma (dO H^T) + dP k^.

#include "kernels/gdn/cuda/gradients_group.cuh"

namespace hybridcp::gdn::cuda::gradients {

/// From dO D^T (in) and Q K^T: dP, r_q dP to shared memory and dP r_k as operand A; column sums of
/// N1. Returns the row sums.
HCP_DEVICE device::Float2 read_pairs(const Block& block,
                                     uint32_t slot,
                                     float scale,
                                     const Place& at,
                                     const float (&pairs)[32],
                                     const float (&keys)[32],
                                     uint32_t (&operand)[4][4]) {
    const device::Float2 sum = rows_at(slot + kSum * kVectorBytes, at);
    const device::Float2 norm = rows_at(slot + kQueryNorm * kVectorBytes, at);
    device::Float2 through = {0.0F, 0.0F};
    float columns[16];
#pragma unroll
    for (uint32_t step = 0; step < 4; ++step) {
        uint32_t to_share[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t column = 16 * step + i / 2 * 8 + at.pair;
            const bool upper = i % 2 == 0;
            const uint32_t row = at.row + (upper ? 0 : 8);
            const device::Float2 sums = pair_at(slot + kSum * kVectorBytes, column);
            const device::Float2 norms = pair_at(slot + kKeyNorm * kVectorBytes, column);
            const float row_sum = upper ? sum.x : sum.y, row_norm = upper ? norm.x : norm.y;
            const uint32_t from = 8 * step + 2 * i;
            const float dp[2] = {
                decay_between(row_sum, sums.x, column <= row) * (scale * pairs[from]),
                decay_between(row_sum, sums.y, column + 1 <= row) * (scale * pairs[from + 1])};
            // The diagonal does not decay.
            const float path[2] = {
                column < row ? dp[0] * keys[from] * (row_norm * norms.x) : 0.0F,
                column + 1 < row ? dp[1] * keys[from + 1] * (row_norm * norms.y) : 0.0F};
            (upper ? through.x : through.y) += path[0] + path[1];
            for (uint32_t e = 0; e < 2; ++e) {
                float& total = columns[4 * step + i / 2 * 2 + e];
                total = upper ? path[e] : total + path[e];
            }
            to_share[i] = device::pack_bf16(dp[0] * row_norm, dp[1] * row_norm);
            operand[step][i] = device::pack_bf16(dp[0] * norms.x, dp[1] * norms.y);
        }
        device::store_matrix(block_address(block.shared + kReadPairs, 16 * at.warp, 16 * step),
                             to_share);
    }
    publish_warp(block, kReadPairsReady);
    store_column_sums(columns, block.shared + kColumnSums + at.warp * kVectorBytes);
    return {sum_pairs_of_row(through.x), sum_pairs_of_row(through.y)};
}

HCP_DEVICE void gradients_of_reads(const GradientsParams& p, const Block& block, const Item& item) {
    const Place at = place();
    const uint32_t slot = block.slot(item.turn);
    float dq[64];
    wait_full(block, item, kOutputGradients);
    wait_full(block, item, kState);
    multiply_tiles(dq, block.tile(kOutputGradients), block.tile(kState));
    finish(dq);
    release(block, kState);
    wait_gates(block, item);
    const device::Float2 gamma = rows_at(slot + kGamma * kVectorBytes, at);
    const device::Float2 norm = rows_at(slot + kQueryNorm * kVectorBytes, at);
    scale_rows(dq, {p.shape.scale * gamma.x, p.shape.scale * gamma.y});
    wait_full(block, item, kQueries);
    const device::Float2 dot = dot_rows(dq, block.tile(kQueries), at);

    float pairs[32], keys[32];
    wait_full(block, item, kKeys);
    multiply_pairs(keys, block.tile(kQueries), block.tile(kKeys), false);
    finish(keys);
    device::mbarrier_wait(block.barrier(kSolvedReady), item.parity());
    multiply_pairs(pairs, block.tile(kOutputGradients), block.shared + kSolved, false);
    finish(pairs);
    release(block, kOutputGradients);
    device::mbarrier_wait(block.barrier(kSumsEmpty), item.parity() ^ 1);
    uint32_t dp[4][4];
    const device::Float2 through = read_pairs(block, slot, p.shape.scale, at, pairs, keys, dp);
    multiply(dq, dp, block.tile(kKeys), true);
    store_rows(block.shared + kThroughReads, at,
               {norm.x * dot.x + through.x, norm.y * dot.y + through.y});
    arrive_warp(block, kSumsFull);
    finish(dq);
    device::barrier_sync(kProductsDone, kWorkingThreads);
    hand_out_part(block, at, kQueryPart, dq);
    reduce_parts(p, block, item);
}

}  // namespace hybridcp::gdn::cuda::gradients
