// The products of a backward chunk that its gradients are made of.
#pragma once

#include "kernels/gdn/fused/backward_scratch.h"

namespace hybridcp::HCP_ISA {

/// z_i = <D_i, e^{B-b_i} (K dH')_i>: what the gradient of the end state says of row i's writing.
/// From D in fp32: rounding it would be the largest error of dg in bf16. Its lanes are not summed
/// yet. Fills scratch.d_rows too. reads: e^{B-b} K dH', of which nothing is read where dH' is zero.
template <typename Engine>
HCP_STAGE void sum_writes(ChunkSizes sizes,
                          const KeyChunk<Engine>& keys,
                          TokenRows<float> new_values,
                          TokenRows<float> reads,
                          const State<Engine>& gradient,
                          BackwardScratch<Engine>& scratch) {
    const int elements = BackwardScratch<Engine>::value_elements(sizes);
    auto* d_rows = scratch.d_rows;
    float* after = scratch.after_lanes;
    const bool is_zero = gradient.zero;
    for (int i = 0; i < keys.rows; ++i) {
        const float* read = reads.row(i);
        Vec sum = {};
        for (int j = 0; j < sizes.values; j += 2 * kLanes) {
            Vec pair[2];
            new_values.load_pair(i, j, pair);
            store_elements<Engine>(d_rows + i * elements + j, pair);
            sum += pair[0] * load(read + j);
            sum += pair[1] * load(read + j + kLanes);
        }
        store(after + i * kLanes, is_zero ? Vec{} : sum);
    }
}

/// scratch.dots: dO D^T and dR D^T.
template <typename Engine>
HCP_STAGE void pair_dots(ChunkSizes sizes,
                         const KeyChunk<Engine>& keys,
                         BackwardScratch<Engine>& scratch) {
    const int elements = BackwardScratch<Engine>::value_elements(sizes);
    const int depth = sizes.values / Engine::kPerUnit;
    pack_columns_as_depth<Engine>(scratch.d_rows, elements, keys.rows, sizes.values,
                                  scratch.d_columns, depth * kPanel);
    Engine::multiply_to(
        {.left = rows_left<Engine>(scratch.rows, elements),
         .right = {scratch.d_columns, depth * kPanel},
         .rows = 2 * keys.rows,
         .columns = round_up(keys.rows, kPanel),
         .ahead = keys.ahead,
         .triangle = keys.rows},
        [=](int) { return DepthRange{0, depth}; }, scratch.dots, sizes.token_row);
}

/// A panel of columns of K, k and what follows: dO H^T and dR H^T to scratch.reads, D dH'^T to
/// scratch.writes, of states that both lie transposed. state: right operand H^T, depth V; null for
/// zeros.
template <typename Engine>
HCP_STAGE void row_products(ChunkSizes sizes,
                            const KeyChunk<Engine>& keys,
                            const std::uint32_t* state,
                            const State<Engine>& gradient,
                            BackwardScratch<Engine>& scratch,
                            int k) {
    const int elements = BackwardScratch<Engine>::value_elements(sizes);
    const int depth = sizes.values / Engine::kPerUnit;
    if (state != nullptr) {
        Engine::multiply_to(
            {.left = rows_left<Engine>(scratch.rows, elements),
             .right = {state + k * depth, 0},
             .rows = 2 * keys.rows,
             .columns = kPanel,
             .ahead = keys.ahead},
            [=](int) { return DepthRange{0, depth}; }, scratch.reads, kPanel);
    }
    if (!gradient.zero) {
        Engine::multiply_to(
            {.left = rows_left<Engine>(scratch.d_rows, elements),
             .right = {gradient.right + k * depth, 0},
             .rows = keys.rows,
             .columns = kPanel,
             .ahead = keys.ahead},
            [=](int) { return DepthRange{0, depth}; }, scratch.writes, kPanel);
    }
}

}  // namespace hybridcp::HCP_ISA
