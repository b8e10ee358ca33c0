// From the products of a chunk with states to its gradients: sums over rows and value heads.
#pragma once

#include "kernels/gdn/fused/gradient_products.h"

namespace hybridcp::HCP_ISA {

/// What sum_panel reads.
template <typename Input>
struct SumInputs {
    TokenRows<Input> q, k;  // before they are normalised
    bool is_first = true;   // whether the value head is the first of its key head
    bool has_state = false, has_gradient = false;
};

/// Of a panel of columns from k on: dq and dk through the state, and what they add to the sums of
/// rows. The first value head of a key head writes dq and dk, the others add to them.
template <typename Engine, typename Input>
HCP_STAGE void sum_panel(const GdnProblemView& problem,
                         ChunkSizes sizes,
                         const KeyChunk<Engine>& keys,
                         HeadChunk head,
                         const BackwardScratch<Engine>& scratch,
                         SumInputs<Input> given,
                         KeyGradients sums,
                         int k) {
    const int row_stride = sizes.key_row, elements = keys.element_row(sizes), rows = keys.rows;
    const float *q_inverse = keys.q_inverse, *k_inverse = keys.k_inverse;
    const auto* k_rows = keys.k_rows + k;
    const float *reads = scratch.reads, *writes = scratch.writes;
    float *q_lanes = scratch.q_lanes, *k_lanes = scratch.k_lanes, *after = scratch.after_lanes;
    float *dq_sums = sums.dq + k, *dk_sums = sums.dk + k;
    const float scale = problem.scale;
    for (int i = 0; i < rows; ++i) {
        const int row = i * row_stride;
        const float erase = head.gamma[i], read = scale * erase;
        const float to_end = head.to_end[i], beta = head.beta[i];
        Vec through_q = {}, through_k = {}, rounded_off = load(after + i * kLanes);
        if (k > 0) {
            through_q = load(q_lanes + i * kLanes);
            through_k = load(k_lanes + i * kLanes);
        }
        for (int c = 0; c < kPanel; c += kLanes) {
            Vec dq = {}, erased = {}, dk = {};
            const Vec x = k_inverse[i] * load(given.k.row(i) + k + c);
            if (given.has_state) {
                dq = read * load(reads + i * kPanel + c);
                erased = erase * load(reads + (rows + i) * kPanel + c);
            }
            if (given.has_gradient) {
                dk = to_end * load(writes + i * kPanel + c);
            }
            through_q += dq * (q_inverse[i] * load(given.q.row(i) + k + c));
            through_k += erased * x;
            rounded_off += dk * (x - load(k_rows + i * elements + c));  // z has the rounded k
            dk -= beta * erased;
            store(dq_sums + row + c, given.is_first ? dq : load(dq_sums + row + c) + dq);
            store(dk_sums + row + c, given.is_first ? dk : load(dk_sums + row + c) + dk);
        }
        store(q_lanes + i * kLanes, through_q);
        store(k_lanes + i * kLanes, through_k);
        store(after + i * kLanes, rounded_off);
    }
}

/// The sums of rows, once every panel is there: a part of dg, and what is added to dbeta.
/// solved: dR.
template <typename Engine, typename Input>
HCP_STAGE void sum_rows(ChunkSizes sizes,
                        const KeyChunk<Engine>& keys,
                        HeadChunk head,
                        TokenRows<Input> v,
                        TokenRows<float> solved,
                        const BackwardScratch<Engine>& scratch,
                        float* dbeta) {
    for (int i = 0; i < keys.rows; i += kLanes) {
        Vec values[kLanes], lanes[kLanes];
        for (int n = 0; n < kLanes; ++n) {
            Vec sum[2] = {};
            for (int j = 0; j < sizes.values; j += 2 * kLanes) {
                Vec dr[2], x[2];
                solved.load_pair(i + n, j, dr);
                v.load_pair(i + n, j, x);
                sum[0] += dr[0] * x[0];
                sum[1] += dr[1] * x[1];
            }
            values[n] = sum[0] + sum[1];
        }
        const auto summed = [&](const float* of) {
            for (int n = 0; n < kLanes; ++n) {
                lanes[n] = load(of + (i + n) * kLanes);
            }
            return sums_of_lanes(lanes);
        };
        const Vec erased = summed(scratch.k_lanes);
        store(scratch.after + i, summed(scratch.after_lanes));
        store(scratch.crossing + i, summed(scratch.q_lanes) - load(head.beta + i) * erased);
        store(dbeta + i, load(dbeta + i) + (sums_of_lanes(values) - erased));
    }
}

}  // namespace hybridcp::HCP_ISA
