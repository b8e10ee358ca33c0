#pragma once

// The warpgroup of the gradients kernel that makes D and dR for all, dV, dbeta and dN.

#include "kernels/gdn/cuda/gradients_pairs.cuh"
#include "kernels/gdn/cuda/gradients_products.cuh"

namespace hybridcp::gdn::cuda::gradients {

HCP_DEVICE void store_sums(uint32_t tile, const Place& at, const float (&sums)[64]) {
#pragma unroll
    for (uint32_t step = 0; step < 8; ++step) {
        uint32_t packed[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            packed[i] = device::pack_bf16(sums[8 * step + 2 * i], sums[8 * step + 2 * i + 1]);
        }
        device::store_matrix(block_address(tile, 16 * at.warp, 16 * step), packed);
    }
}

/// dV = beta dR in the space of Z, for the warp that stores it.
HCP_DEVICE void leave_value_gradient(const Block& block,
                                     const Place& at,
                                     device::Float2 beta,
                                     float (&dr)[64]) {
#pragma unroll
    for (uint32_t i = 0; i < 64; ++i) {
        dr[i] *= i % 4 < 2 ? beta.x : beta.y;
    }
    store_sums(block.tile(kValueGradients), at, dr);
    arrive_warp(block, kValueGradientsReady);
}

/// D = T diag(beta) E, left for all, and dR = T^T Z, in flight behind the fence.
HCP_DEVICE void solve(const Block& block, const Turn& turn, const Place& at, float (&dr)[64]) {
    uint32_t inverse[4][4];
    wait_full(block, turn, kInverse);
    load_inverse(inverse, block.tile(kInverse), block.slot(turn.index) + kBeta * kVectorBytes, at);
    {
        float sums[64];
        wait_full(block, turn, kErrors);
        multiply(sums, inverse, block.tile(kErrors), false);
        finish(sums);
        wait_free(block, turn, kSolvedEmpty);
        store_sums(block.shared + kSolved, at, sums);
    }
    load_inverse_transposed(inverse, block.tile(kInverse), at);
    release(block, kInverse);
    wait_full(block, turn, kValueGradients);
    multiply(dr, inverse, block.tile(kValueGradients), false);
    publish_warp(block, kSolvedReady);
    finish(dr);
    device::barrier_sync(kValueGradientsRead, 128);
}

/// Leaves dR and dV; returns <dR, E> by row.
HCP_DEVICE device::Float2 leave_adjoint(const Block& block, const Turn& turn, const Place& at) {
    float dr[64];
    solve(block, turn, at, dr);
    wait_free(block, turn, kAdjointEmpty);
    store_sums(block.shared + kAdjoint, at, dr);
    publish_warp(block, kAdjointReady);
    const device::Float2 dot = dot_rows(dr, block.tile(kErrors), at);
    release(block, kErrors);
    leave_value_gradient(block, at, rows_at(block.slot(turn.index) + kBeta * kVectorBytes, at), dr);
    return dot;
}

/// k^ k^T for all turns of an item.
HCP_DEVICE void multiply_keys(const Block& block, const Turn& turn, const Place& at) {
    float pairs[32];
    wait_full(block, turn, kKeys);
    multiply_pairs(pairs, block.tile(kKeys), block.tile(kKeys));
    finish(pairs);
    release(block, kKeys);
    const uint32_t norms = block.slot(turn.index) + kKeyNorm * kVectorBytes;
    store_products(pairs, rows_at(norms, at), norms, block.shared + kEraseProducts, at);
}

HCP_DEVICE void store_dbeta(const GradientsParams& p,
                            const Block& block,
                            const Turn& turn,
                            const Place& at,
                            device::Float2 value) {
    const Item item = served_item(block, turn);
    const int32_t head = head_of(block, item.key_head, turn.member);
    for (uint32_t i = 0; i < 2 && at.pair == 0; ++i) {
        const auto row = static_cast<int32_t>(at.row + 8 * i);
        if (row < item.span.tokens) {
            const int64_t token = int64_t{item.span.token} + row;
            device::store_global(
                p.dbeta + token * p.dbeta_token_stride + head * p.dbeta_head_stride,
                i == 0 ? value.x : value.y);
        }
    }
}

HCP_DEVICE void solve_turn(const GradientsParams& p,
                           const Block& block,
                           const Turn& turn,
                           const Place& at,
                           float (&dn)[32]) {
    wait_gates(block, turn);
    const device::Float2 through_errors = leave_adjoint(block, turn, at);
    if (turn.member == 0) {
        multiply_keys(block, turn, at);
    }
    float solved[32];
    wait_ready(block, turn, kSolvedReady);
    wait_ready(block, turn, kAdjointReady);
    multiply_pairs(solved, block.shared + kAdjoint, block.shared + kSolved);
    finish(solved);
    arrive_warp(block, kSolvedEmpty);
    arrive_warp(block, kAdjointEmpty);
    const uint32_t slot = block.slot(turn.index);
    const device::Float2 beta = rows_at(slot + kBeta * kVectorBytes, at);
    wait_free(block, turn, kSumsEmpty);
    const device::Float2 through =
        weigh_pairs(solved, {-beta.x, -beta.y}, slot, block.shared + kEraseProducts,
                    block.shared + kEraseColumns, at, dn);
    store_rows(block.shared + kThroughPairs, at, {-beta.x * through.x, -beta.y * through.y});
    arrive_warp(block, kSumsFull);
    store_dbeta(p, block, turn, at, {through_errors.x - through.x, through_errors.y - through.y});
}

HCP_DEVICE void gradients_of_values(const GradientsParams& p, const Block& block, uint32_t item) {
    const Place at = place();
    float dn[32] = {};
#pragma unroll 1
    for (uint32_t member = 0; member < block.group; ++member) {
        const Turn turn = turn_of(block, item, member);
        solve_turn(p, block, turn, at, dn);
        if (member + 1 < block.group) {
            arrive_warp(block, kGatesEmpty + turn.parity());
        }
    }
    const Turn last = turn_of(block, item, block.group - 1);
    device::mbarrier_wait(block.barrier(kErasePairsEmpty), last.item_parity() ^ 1);
    pack_erasures(dn, block.slot(last.index), block.shared + kErasePairs, at);
    publish_warp(block, kErasePairsReady);
    arrive_warp(block, kGatesEmpty + last.parity());
}

}  // namespace hybridcp::gdn::cuda::gradients
