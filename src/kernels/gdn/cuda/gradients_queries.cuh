#pragma once

// The warpgroup of the gradients kernel that makes dP and dq^ = s gamma (dO H^T) + dP k^.

#include "kernels/gdn/cuda/gradients_pairs.cuh"
#include "kernels/gdn/cuda/gradients_products.cuh"
#include "kernels/gdn/cuda/gradients_rows.cuh"

namespace hybridcp::gdn::cuda::gradients {

/// s q^ k^T for all turns of an item.
HCP_DEVICE void multiply_queries(const Block& block,
                                 const Turn& turn,
                                 float scale,
                                 const Place& at) {
    float pairs[32];
    wait_full(block, turn, kQueries);
    wait_full(block, turn, kKeys);
    multiply_pairs(pairs, block.tile(kQueries), block.tile(kKeys));
    finish(pairs);
    const uint32_t slot = block.slot(turn.index);
    const device::Float2 norm = rows_at(slot + kQueryNorm * kVectorBytes, at);
    store_products(pairs, {scale * norm.x, scale * norm.y}, slot + kKeyNorm * kVectorBytes,
                   block.shared + kReadProducts, at);
}

/// Adds s gamma (dO H^T), half of the columns at a time; returns its products with q^ by row.
HCP_DEVICE device::Float2 add_reads(
    const Block& block, const Turn& turn, float scale, const Place& at, float (&dq)[64]) {
    const uint32_t slot = block.slot(turn.index), queries = block.tile(kQueries);
    const device::Float2 gamma = rows_at(slot + kGamma * kVectorBytes, at);
    const device::Float2 factor = {scale * gamma.x, scale * gamma.y};
    device::Float2 dot = {0.0F, 0.0F};
    float part[32];
    wait_full(block, turn, kState);
    wait_full(block, turn, kOutputGradients);
    multiply_state(part, block.tile(kOutputGradients), block.tile(kState));
    finish(part);
    add_dots(dot, part, queries, 0, at);
    add_scaled<0>(dq, part, factor);
    multiply_state(part, block.tile(kOutputGradients), block.tile(kState) + kPanelBytes);
    finish(part);
    release(block, kState);
    add_dots(dot, part, queries, 64, at);
    add_scaled<32>(dq, part, factor);
    const device::Float2 norm = rows_at(slot + kQueryNorm * kVectorBytes, at);
    return {norm.x * factor.x * sum_pairs_of_row(dot.x),
            norm.y * factor.y * sum_pairs_of_row(dot.y)};
}

HCP_DEVICE void reads_of_turn(const Block& block,
                              const Turn& turn,
                              float scale,
                              const Place& at,
                              float (&dq)[64],
                              float (&dp)[32]) {
    wait_gates(block, turn);
    if (turn.member == 0) {
        multiply_queries(block, turn, scale, at);
    }
    const device::Float2 dot = add_reads(block, turn, scale, at, dq);
    float solved[32];
    wait_ready(block, turn, kSolvedReady);
    multiply_pairs(solved, block.tile(kOutputGradients), block.shared + kSolved);
    finish(solved);
    release(block, kOutputGradients);
    arrive_warp(block, kSolvedEmpty);
    wait_free(block, turn, kSumsEmpty);
    const device::Float2 through =
        weigh_pairs(solved, {1.0F, 1.0F}, block.slot(turn.index), block.shared + kReadProducts,
                    block.shared + kReadColumns, at, dp);
    store_rows(block.shared + kThroughReads, at, {dot.x + through.x, dot.y + through.y});
    arrive_warp(block, kSumsFull);
}

HCP_DEVICE void gradients_of_queries(const GradientsParams& p, const Block& block, uint32_t item) {
    const Place at = place();
    float dq[64] = {}, dp[32] = {};
#pragma unroll 1
    for (uint32_t member = 0; member < block.group; ++member) {
        const Turn turn = turn_of(block, item, member);
        reads_of_turn(block, turn, p.shape.scale, at, dq, dp);
        if (member + 1 < block.group) {
            arrive_warp(block, kGatesEmpty + turn.parity());
        }
    }
    const Turn last = turn_of(block, item, block.group - 1);
    uint32_t operand[4][4], rows[8][4];
    device::mbarrier_wait(block.barrier(kReadPairsEmpty), last.item_parity() ^ 1);
    pack_reads(dp, p.shape.scale, block.slot(last.index), block.shared + kReadPairs, at, operand);
    publish_warp(block, kReadPairsReady);
    multiply(dq, operand, block.tile(kKeys), true);
    load_rows_of_warp(block.tile(kQueries), at, rows);
    finish(dq);
    release(block, kKeys);
    release(block, kQueries);
    finish_rows(p, block, last, at, kQueryNorm, rows, dq);
    store_rows_of(p, block, last, at, p.dq,
                  block.shared + kReadProducts + blocks_before(at.warp) * kBlockBytes, dq);
    arrive_warp(block, kGatesEmpty + last.parity());
}

}  // namespace hybridcp::gdn::cuda::gradients
