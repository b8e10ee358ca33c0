#pragma once

// dP and dN of the gradients kernel from products of pairs of tokens, and their parts of dg.

#include "kernels/gdn/cuda/gradients_fragments.cuh"

namespace hybridcp::gdn::cuda::gradients {

/// (dO or dR) D^T and (Q or K) K^T.
struct Pairs {
    float solved[32], keys[32];
};
/// What belongs to this lane's two rows: b in log2 units, r of Q or K, and s or -beta.
struct PairRows {
    device::Float2 sum, norm, factor;
};
HCP_DEVICE PairRows pair_rows(uint32_t slot, Vector norm, const Place& at, device::Float2 factor) {
    return {rows_at(slot + kSum * kVectorBytes, at), rows_at(slot + norm * kVectorBytes, at),
            factor};
}

/// e^{b_i - b_j} in log2 units where `kept`, else 0; masked before the exponential.
HCP_DEVICE float decay_between(float later, float earlier, bool kept) {
    constexpr float kNever = -1000.0F;
    return device::exp2_approximate(kept ? later - earlier : kNever);
}

/// e^{b_i - b_j} (dO or dR) D^T of one row and two neighbouring columns.
template <bool HasDiagonal>
HCP_DEVICE device::Float2 decay_pair(
    const float* solved, float sum, device::Float2 sums, uint32_t row, uint32_t column) {
    const uint32_t end = HasDiagonal ? row + 1 : row;
    return {decay_between(sum, sums.x, column < end) * solved[0],
            decay_between(sum, sums.y, column + 1 < end) * solved[1]};
}

/// The gradient times the row's r to `tile`, for its transpose as operand A, and times the column's
/// r_k as operand A itself. Sums over columns of N to `columns`; returns those over rows, without
/// the factor.
template <bool HasDiagonal>
HCP_DEVICE device::Float2 weigh_pairs(const Pairs& pairs,
                                      const PairRows& rows,
                                      uint32_t slot,
                                      uint32_t tile,
                                      uint32_t (&operand)[4][4],
                                      float (&columns)[16]) {
    const Place at = place();
    const float weight[2] = {rows.factor.x * rows.norm.x, rows.factor.y * rows.norm.y};
    float through[2] = {0.0F, 0.0F};
#pragma unroll
    for (uint32_t step = 0; step < 4; ++step) {
        uint32_t shared[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t from = 8 * step + 2 * i, half = i % 2;
            const uint32_t row = at.row + 8 * half, column = 16 * step + i / 2 * 8 + at.pair;
            const device::Float2 sums = pair_at(slot + kSum * kVectorBytes, column);
            const device::Float2 norms = pair_at(slot + kKeyNorm * kVectorBytes, column);
            const float factor = half == 0 ? rows.factor.x : rows.factor.y;
            const device::Float2 decayed = decay_pair<HasDiagonal>(
                pairs.solved + from, half == 0 ? rows.sum.x : rows.sum.y, sums, row, column);
            // The diagonal does not decay: it is no path.
            const float path[2] = {column < row ? decayed.x * pairs.keys[from] : 0.0F,
                                   column + 1 < row ? decayed.y * pairs.keys[from + 1] : 0.0F};
            through[half] += path[0] * norms.x;
            through[half] += path[1] * norms.y;
            float* totals = columns + 4 * step + i / 2 * 2;
            totals[0] = (half == 0 ? 0.0F : totals[0]) + path[0] * weight[half];
            totals[1] = (half == 0 ? 0.0F : totals[1]) + path[1] * weight[half];
            if (half == 1) {
                totals[0] *= norms.x;
                totals[1] *= norms.y;
            }
            shared[i] = device::pack_bf16(decayed.x * weight[half], decayed.y * weight[half]);
            operand[step][i] =
                device::pack_bf16(decayed.x * (factor * norms.x), decayed.y * (factor * norms.y));
        }
        device::store_matrix(block_address(tile, 16 * at.warp, 16 * step), shared);
    }
    return {rows.norm.x * sum_pairs_of_row(through[0]), rows.norm.y * sum_pairs_of_row(through[1])};
}

}  // namespace hybridcp::gdn::cuda::gradients
