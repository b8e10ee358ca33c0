#pragma once

// dP and dN of the gradients kernel from products of pairs of tokens, and their parts of dg.

#include "kernels/gdn/cuda/gradients_layout.cuh"
#include "kernels/gdn/cuda/gradients_products.cuh"

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

/// One row and two neighbouring columns.
struct TwoPairs {
    float gradient[2];  // dP or dN
    float path[2];      // of N below the diagonal, without the row's factor
};
template <bool HasDiagonal>
HCP_DEVICE TwoPairs
weigh(const Pairs& pairs, const PairRows& rows, uint32_t slot, const Place& at, uint32_t index) {
    const bool upper = index / 2 % 2 == 0;
    const uint32_t row = at.row + (upper ? 0 : 8), column = index / 4 * 8 + at.pair;
    const device::Float2 sums = pair_at(slot + kSum * kVectorBytes, column);
    const device::Float2 norms = pair_at(slot + kKeyNorm * kVectorBytes, column);
    const float sum = upper ? rows.sum.x : rows.sum.y;
    const float norm = upper ? rows.norm.x : rows.norm.y;
    const float factor = upper ? rows.factor.x : rows.factor.y;
    TwoPairs two;
    for (uint32_t e = 0; e < 2; ++e) {
        const bool below = column + e < row;
        const bool kept = HasDiagonal ? column + e <= row : below;
        const float earlier = e == 0 ? sums.x : sums.y, key_norm = e == 0 ? norms.x : norms.y;
        const float decayed = decay_between(sum, earlier, kept) * pairs.solved[index + e];
        two.gradient[e] = factor * decayed;
        // The diagonal does not decay.
        two.path[e] = below ? decayed * pairs.keys[index + e] * (norm * key_norm) : 0.0F;
    }
    return two;
}

/// The gradient times the row's r to `tile`, for its transpose as operand A, and times the column's
/// r_k as operand A itself. Sums over columns of N to `columns` (64 floats); returns those over
/// rows, without the factor.
template <bool HasDiagonal>
HCP_DEVICE device::Float2 weigh_pairs(const Pairs& pairs,
                                      const PairRows& rows,
                                      uint32_t slot,
                                      uint32_t tile,
                                      uint32_t (&operand)[4][4],
                                      float (&columns)[16]) {
    const Place at = place();
    device::Float2 through = {0.0F, 0.0F};
#pragma unroll
    for (uint32_t step = 0; step < 4; ++step) {
        uint32_t shared[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const bool upper = i % 2 == 0;
            const float factor = upper ? rows.factor.x : rows.factor.y;
            const float norm = upper ? rows.norm.x : rows.norm.y;
            const TwoPairs two = weigh<HasDiagonal>(pairs, rows, slot, at, 8 * step + 2 * i);
            (upper ? through.x : through.y) += two.path[0] + two.path[1];
            float* totals = columns + 4 * step + i / 2 * 2;
            totals[0] = factor * two.path[0] + (upper ? 0.0F : totals[0]);
            totals[1] = factor * two.path[1] + (upper ? 0.0F : totals[1]);
            const device::Float2 norms =
                pair_at(slot + kKeyNorm * kVectorBytes, 16 * step + i / 2 * 8 + at.pair);
            shared[i] = device::pack_bf16(two.gradient[0] * norm, two.gradient[1] * norm);
            operand[step][i] =
                device::pack_bf16(two.gradient[0] * norms.x, two.gradient[1] * norms.y);
        }
        device::store_matrix(block_address(tile, 16 * at.warp, 16 * step), shared);
    }
    return {sum_pairs_of_row(through.x), sum_pairs_of_row(through.y)};
}

}  // namespace hybridcp::gdn::cuda::gradients
