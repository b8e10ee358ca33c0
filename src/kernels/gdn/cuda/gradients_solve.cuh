#pragma once

// D and dR of the gradients kernel for all warpgroups, dV and dbeta.

#include "kernels/gdn/cuda/gradients_products.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients {

/// The sums times the rows' factors, in fp16 or bf16.
template <bool kF16>
HCP_DEVICE void store_sums(uint32_t tile,
                           const Place& at,
                           const float (&sums)[64],
                           device::Float2 factor) {
#pragma unroll
    for (uint32_t step = 0; step < 8; ++step) {
        uint32_t packed[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const float of_row = i % 2 == 0 ? factor.x : factor.y;
            const float* sum = sums + 8 * step + 2 * i;
            packed[i] = kF16 ? device::pack_f16(of_row * sum[0], of_row * sum[1])
                             : device::pack_bf16(of_row * sum[0], of_row * sum[1]);
        }
        device::store_matrix(block_address(tile, 16 * at.warp, 16 * step), packed);
    }
}

/// D = T diag(beta) E, left for all, and dR = T^T Z, in flight behind the fence.
HCP_DEVICE void solve(const Block& block, const Turn& turn, const Place& at, float (&dr)[64]) {
    uint32_t inverse[4][4];
    wait_full(block, turn, kInverse);
    load_inverse(inverse, block.tile(kInverse), block.slot(turn.index) + kBeta * kVectorBytes, at);
    {
        float sums[64];
        wait_full(block, turn, kErrors);
        multiply<kFp16>(sums, inverse, block.tile(kErrors), false);
        finish(sums);
        wait_free(block, turn, kSolvedEmpty);
        store_sums<kFp16>(block.shared + kSolved, at, sums, {1.0F, 1.0F});
    }
    load_inverse_transposed(inverse, block.tile(kInverse), at);
    wait_full(block, turn, kValueGradients);
    multiply<kFp16>(dr, inverse, block.tile(kValueGradients), false);
    publish_warp(block, kSolvedReady);
    release(block, kInverse);
    finish(dr);
    device::barrier_sync(kValueGradientsRead, 128);
}

/// Leaves dR, and dV = beta dR in the space of Z; returns <dR, E> by row.
HCP_DEVICE device::Float2 leave_adjoint(const Block& block, const Turn& turn, const Place& at) {
    float dr[64];
    solve(block, turn, at, dr);
    const device::Float2 beta = rows_at(block.slot(turn.index) + kBeta * kVectorBytes, at);
    wait_free(block, turn, kAdjointEmpty);
    store_sums<kFp16>(block.shared + kAdjoint, at, dr, {1.0F, 1.0F});
    const float up = power_at(block, turn, kGradientPower);
    store_sums<false>(block.tile(kValueGradients), at, dr, {up * beta.x, up * beta.y});
    device::Float2 dot = {0.0F, 0.0F};
    uint32_t errors[4][4];
    load_rows(errors, block.tile(kErrors), 0, at);
    add_dots<0, kFp16>(dot, dr, errors);
    load_rows(errors, block.tile(kErrors), 64, at);
    add_dots<32, kFp16>(dot, dr, errors);
    publish_warp(block, kAdjointReady);
    arrive_warp(block, kValueGradientsReady);
    release(block, kErrors);
    dot = sum_rows(dot);
    const float power = power_at(block, turn, kPower);
    return {power * dot.x, power * dot.y};
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

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients
