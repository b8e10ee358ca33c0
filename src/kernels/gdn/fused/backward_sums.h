// From the products of a chunk to its gradients: sums over pairs of rows, and dg.
#pragma once

#include "kernels/gdn/fused/backward_scratch.h"
#include "kernels/simd/doubles.h"

namespace hybridcp::HCP_ISA {

/// dP and dN, summed over value heads as above; row and column sums of N; a part of dbeta ([C],
/// written).
template <typename Engine>
HCP_STAGE void sum_pairs(const GdnProblemView& problem,
                         ChunkSizes sizes,
                         const KeyChunk<Engine>& keys,
                         HeadChunk head,
                         const BackwardScratch<Engine>& scratch,
                         bool is_first,
                         KeyGradients sums,
                         float* dbeta) {
    VecInt lane;
    for (int i = 0; i < kLanes; ++i) {
        lane[i] = i;
    }
    constexpr int most_blocks = 64 / kLanes;
    VecDouble columns[most_blocks] = {};
    for (int i = 0; i < keys.rows; ++i) {
        VecDouble row_sum = {};
        Vec through_system = {};
        for (int j = 0; j <= i; j += kLanes) {
            const int at = i * sizes.token_row + j;
            const Vec gam = load(head.gam + at), kk = load(keys.kk + at);
            const VecInt below = lane + j < i;
            const Vec read = gam * load(scratch.dots + at);  // 0 above the diagonal
            const Vec dl =
                select(below, -gam * load(scratch.dots + at + keys.rows * sizes.token_row), Vec{});
            const Vec dn = head.beta[i] * dl;
            const Vec dp = problem.scale * read;
            store(sums.dp + at, is_first ? dp : load(sums.dp + at) + dp);
            store(sums.dn + at, is_first ? dn : load(sums.dn + at) + dn);
            through_system += dl * kk;
            const Vec n = select(below, read * load(keys.qk + at), Vec{}) + dn * kk;
            const VecDouble wide = widened(n);
            row_sum += wide;
            columns[j / kLanes] += wide;
        }
        for (int j = round_up(i + 1, kLanes); is_first && j < keys.rows; j += kLanes) {
            store(sums.dp + i * sizes.token_row + j, Vec{});
            store(sums.dn + i * sizes.token_row + j, Vec{});
        }
        scratch.row_sums[i] = sum_lanes(row_sum);
        dbeta[i] = sum_lanes(through_system);
    }
    for (int j = 0; j < keys.rows; j += kLanes) {
        store(scratch.column_sums + j, columns[j / kLanes]);
    }
}

/// dg of the chunk's tokens: every term is a path that crosses the token. `through`: e^B <dH', H>.
/// Sums are fp64, in which the pairs on one side of a token cancel.
template <typename Engine>
HCP_STAGE void sum_log_decay_gradient(const GdnProblemView& problem,
                                      const KeyChunk<Engine>& keys,
                                      const BackwardScratch<Engine>& scratch,
                                      double through,
                                      const GdnView& dg,
                                      std::int64_t token,
                                      std::int64_t head) {
    // Sums over the tokens before each, kept: taking them away again would cancel where all else is
    // 0.
    double before[kMostChunkTokens];
    double sum = through;
    for (int t = 0; t < keys.count; ++t) {
        before[t] = sum;
        sum += scratch.after[t];
    }
    double crossing = 0;
    for (int t = keys.count - 1; t >= 0; --t) {
        crossing += scratch.crossing[t] + (scratch.row_sums[t] - scratch.column_sums[t]);
        const bool reset = *at_token<const float>(problem.g, token + t, head) < kLowestLogDecay;
        *at_token<float>(dg, token + t, head) =
            reset ? 0.0F : static_cast<float>(crossing + before[t]);
    }
}

}  // namespace hybridcp::HCP_ISA
