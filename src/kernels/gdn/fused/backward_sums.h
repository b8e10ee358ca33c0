// From the products of a chunk to its gradients: sums over rows, pairs of rows and value heads.
#pragma once

#include "kernels/gdn/fused/gradient_products.h"
#include "kernels/gdn/fused/gradient_states.h"

namespace hybridcp::HCP_ISA {

/// What a value head brings to sum_rows.
struct SumInputs {
    TokenRows<float> solved;  // dR
    bool is_first;            // of its key head
    bool has_state, has_gradient;
};

/// dq and dk through the state, and their part of dg and dbeta (`dbeta`: [C], written). The first
/// value head of a key head writes the sums, the others add to them.
template <typename Engine, typename Input>
HCP_STAGE void sum_rows(const GdnProblemView& problem,
                        ChunkSizes sizes,
                        const KeyChunk<Engine>& keys,
                        HeadChunk head,
                        TokenRows<Input> v,
                        const BackwardScratch<Engine>& scratch,
                        const SumInputs& given,
                        KeyGradients sums,
                        float* dbeta) {
    const float *q = keys.q, *k_floats = keys.k, *writes = scratch.writes;
    const auto* k_rows = keys.k_rows;
    const int elements = keys.element_row(sizes);
    for (int i = 0; i < keys.rows; ++i) {
        const int row = i * sizes.key_row;
        const float* q_reads = scratch.reads + row;
        const float* k_reads = scratch.reads + (keys.rows + i) * sizes.key_row;
        const float read = problem.scale * head.gamma[i], erase = head.gamma[i];
        const float to_end = head.to_end[i], beta = head.beta[i];
        Vec through_q = {}, through_k = {}, rounded_off = {};
        for (int c = 0; c < sizes.keys; c += kLanes) {
            Vec dq = {}, erased = {}, dk = {};
            const Vec k = load(k_floats + row + c);
            if (given.has_state) {
                dq = read * load(q_reads + c);
                erased = erase * load(k_reads + c);
            }
            if (given.has_gradient) {
                dk = to_end * load(writes + row + c);
            }
            through_q += dq * load(q + row + c);
            through_k += erased * k;
            rounded_off += dk * (k - load(k_rows + i * elements + c));
            dk -= beta * erased;
            store(sums.dq + row + c, given.is_first ? dq : load(sums.dq + row + c) + dq);
            store(sums.dk + row + c, given.is_first ? dk : load(sums.dk + row + c) + dk);
        }
        const float erased = sum_lanes(through_k);
        scratch.after[i] += sum_lanes(rounded_off);  // z was made with the rounded k
        scratch.crossing[i] = sum_lanes(through_q) - head.beta[i] * erased;
        dbeta[i] = dot(given.solved.row(i), v.row(i), sizes.values) - erased;
    }
}

/// dP and dN, summed over value heads as above; row and column sums of N; the rest of dbeta.
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
            const VecDouble wide = __builtin_convertvector(n, VecDouble);
            row_sum += wide;
            columns[j / kLanes] += wide;
        }
        for (int j = round_up(i + 1, kLanes); is_first && j < keys.rows; j += kLanes) {
            store(sums.dp + i * sizes.token_row + j, Vec{});
            store(sums.dn + i * sizes.token_row + j, Vec{});
        }
        scratch.row_sums[i] = sum_lanes(row_sum);
        dbeta[i] += sum_lanes(through_system);
    }
    for (int j = 0; j < keys.rows; j += kLanes) {
        std::memcpy(scratch.column_sums + j, columns + j / kLanes, sizeof(VecDouble));
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
