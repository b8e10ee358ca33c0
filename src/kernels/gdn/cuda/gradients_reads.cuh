#pragma once

// The warpgroup of the gradients kernel that makes dP and dq^ = s gamma (dO H^T) + dP k^.

#include "kernels/gdn/cuda/gradients_group.cuh"
#include "kernels/gdn/cuda/gradients_pairs.cuh"
#include "kernels/gdn/cuda/gradients_products.cuh"
#include "kernels/gdn/cuda/gradients_rows.cuh"

namespace hybridcp::gdn::cuda::gradients {

/// From dO D^T and Q K^T: r_q dP to shared memory and dP r_k as operand A; column sums of N1.
/// Returns the row sums.
HCP_DEVICE device::Float2 read_pairs(
    const Block& block, const Item& item, float scale, const Place& at, uint32_t (&operand)[4][4]) {
    const uint32_t slot = block.slot(item.turn);
    Pairs pairs;
    wait_full(block, item, kKeys);
    wait_full(block, item, kQueries);
    multiply_pairs(pairs.keys, block.tile(kQueries), block.tile(kKeys));
    finish(pairs.keys);
    wait_full(block, item, kOutputGradients);
    device::mbarrier_wait(block.barrier(kSolvedReady), item.parity());
    multiply_pairs(pairs.solved, block.tile(kOutputGradients), block.shared + kSolved);
    finish(pairs.solved);
    float columns[16];
    const device::Float2 through =
        weigh_pairs<true>(pairs, pair_rows(slot, kQueryNorm, at, {scale, scale}), slot,
                          block.shared + kReadPairs, operand, columns);
    publish_warp(block, kReadPairsReady);
    device::mbarrier_wait(block.barrier(kSumsEmpty), item.parity() ^ 1);
    store_column_sums(columns, block.shared + kColumnSums + at.warp * kVectorBytes);
    return {scale * through.x, scale * through.y};
}

HCP_DEVICE void gradients_of_reads(const GradientsParams& p, const Block& block, const Item& item) {
    const Place at = place();
    const uint32_t slot = block.slot(item.turn);
    uint32_t dp[4][4];
    const device::Float2 through = read_pairs(block, item, p.shape.scale, at, dp);

    float dq[64];
    wait_full(block, item, kState);
    multiply_tiles(dq, block.tile(kOutputGradients), block.tile(kState));
    finish(dq);
    release(block, kState);
    release(block, kOutputGradients);
    const device::Float2 gamma = rows_at(slot + kGamma * kVectorBytes, at);
    scale_rows(dq, {p.shape.scale * gamma.x, p.shape.scale * gamma.y});
    const device::Float2 dot = dot_rows(dq, block.tile(kQueries), at);
    multiply(dq, dp, block.tile(kKeys), true);
    const device::Float2 norm = rows_at(slot + kQueryNorm * kVectorBytes, at);
    store_rows(block.shared + kThroughReads, at,
               {norm.x * dot.x + through.x, norm.y * dot.y + through.y});
    arrive_warp(block, kSumsFull);
    finish(dq);
    release(block, kKeys);
    uint32_t rows[16];
    take_rows(block, at, kQueries, rows);
    sum_and_store(p, block, item, at, kQuerySum, dq, rows);
}

}  // namespace hybridcp::gdn::cuda::gradients
