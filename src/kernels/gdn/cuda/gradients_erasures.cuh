#pragma once

// The warpgroup of the gradients kernel that makes dR, dV, dbeta and the part of dk^ that comes
// from what the chunk erases: -gamma (dE H^T) + dN k^.

#include "kernels/gdn/cuda/gradients_group.cuh"
#include "kernels/gdn/cuda/gradients_pairs.cuh"
#include "kernels/gdn/cuda/gradients_products.cuh"
#include "kernels/gdn/cuda/gradients_rows.cuh"

namespace hybridcp::gdn::cuda::gradients {

/// dV = beta dR in the space of Z, for the warps that store it.
HCP_DEVICE void leave_value_gradient(const Block& block,
                                     const Item& item,
                                     const Place& at,
                                     const float (&dr)[64]) {
    const device::Float2 beta = rows_at(block.slot(item.turn) + kBeta * kVectorBytes, at);
#pragma unroll
    for (uint32_t step = 0; step < 8; ++step) {
        uint32_t packed[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const float factor = i % 2 == 0 ? beta.x : beta.y;
            const float* value = dr + 8 * step + 2 * i;
            packed[i] = device::pack_bf16(factor * value[0], factor * value[1]);
        }
        device::store_matrix(block_address(block.tile(kValueGradients), 16 * at.warp, 16 * step),
                             packed);
    }
    arrive_warp(block, kValueGradientsReady);
}

/// dR, its products with E by row and itself as operand A.
HCP_DEVICE device::Float2 solve_adjoint(const Block& block,
                                        const Item& item,
                                        const Place& at,
                                        uint32_t (&operand)[8][4]) {
    wait_full(block, item, kInverse);
    uint32_t inverse[4][4];
    load_inverse_transposed(inverse, block.tile(kInverse), at);
    wait_full(block, item, kValueGradients);
    float dr[64];
    multiply(dr, inverse, block.tile(kValueGradients), false);
    finish(dr);
    release(block, kInverse);
    device::barrier_sync(kValueGradientsRead, 128);
    wait_full(block, item, kErrors);
    const device::Float2 dot = dot_rows(dr, block.tile(kErrors), at);
    release(block, kErrors);
    pack_operand(operand, dr);
    leave_value_gradient(block, item, at, dr);
    return dot;
}

/// From dR D^T and K K^T: r_k dN to shared memory and dN r_k as operand A; column sums of N2.
/// Returns sum_j (dR D^T)_ij S_ij by row.
HCP_DEVICE device::Float2 erase_pairs(const Block& block,
                                      const Item& item,
                                      const Place& at,
                                      const uint32_t (&dr)[8][4],
                                      uint32_t (&operand)[4][4]) {
    const uint32_t slot = block.slot(item.turn);
    Pairs pairs;
    device::mbarrier_wait(block.barrier(kSolvedReady), item.parity());
    multiply_pairs(pairs.solved, dr, block.shared + kSolved);
    finish(pairs.solved);
    wait_full(block, item, kKeys);
    multiply_pairs(pairs.keys, block.tile(kKeys), block.tile(kKeys));
    finish(pairs.keys);
    const device::Float2 beta = rows_at(slot + kBeta * kVectorBytes, at);
    float columns[16];
    const device::Float2 through =
        weigh_pairs<false>(pairs, pair_rows(slot, kKeyNorm, at, {-beta.x, -beta.y}), slot,
                           block.shared + kErasePairs, operand, columns);
    publish_warp(block, kErasePairsReady);
    device::mbarrier_wait(block.barrier(kSumsEmpty), item.parity() ^ 1);
    store_column_sums(columns, block.shared + kColumnSums + (4 + at.warp) * kVectorBytes);
    return through;
}

HCP_DEVICE void store_dbeta(const GradientsParams& p,
                            const Item& item,
                            const Place& at,
                            device::Float2 value) {
    if (at.pair != 0) {
        return;
    }
    for (uint32_t i = 0; i < 2; ++i) {
        const auto row = static_cast<int32_t>(at.row + 8 * i);
        if (row < item.span.tokens) {
            const int64_t token = int64_t{item.span.token} + row;
            device::store_global(
                p.dbeta + token * p.dbeta_token_stride + item.head * p.dbeta_head_stride,
                i == 0 ? value.x : value.y);
        }
    }
}

HCP_DEVICE void gradients_of_erasures(const GradientsParams& p,
                                      const Block& block,
                                      const Item& item) {
    const Place at = place();
    const uint32_t slot = block.slot(item.turn);
    uint32_t dr[8][4], dn[4][4];
    const device::Float2 through_beta = solve_adjoint(block, item, at, dr);
    const device::Float2 through = erase_pairs(block, item, at, dr, dn);
    store_dbeta(p, item, at, {through_beta.x - through.x, through_beta.y - through.y});

    float dk[64];
    wait_full(block, item, kState);
    multiply(dk, dr, block.tile(kState), false);
    finish(dk);
    release(block, kState);
    const device::Float2 gamma = rows_at(slot + kGamma * kVectorBytes, at);
    const device::Float2 beta = rows_at(slot + kBeta * kVectorBytes, at);
    scale_rows(dk, {-gamma.x * beta.x, -gamma.y * beta.y});
    const device::Float2 dot = dot_rows(dk, block.tile(kKeys), at);
    multiply(dk, dn, block.tile(kKeys), true);
    const device::Float2 norm = rows_at(slot + kKeyNorm * kVectorBytes, at);
    store_rows(block.shared + kThroughErasures, at,
               {norm.x * dot.x - beta.x * through.x, norm.y * dot.y - beta.y * through.y});
    arrive_warp(block, kSumsFull);
    finish(dk);
    uint32_t rows[16];
    take_rows(block, at, kKeys, rows);
    add_writes_part(block, item, at, dk);
    sum_and_store(p, block, item, at, kKeySum, dk, rows);
}

}  // namespace hybridcp::gdn::cuda::gradients
