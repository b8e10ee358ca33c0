// The products of a backward chunk that its gradients are made of.
#pragma once

#include "kernels/gdn/fused/backward_scratch.h"

namespace hybridcp::HCP_ISA {

/// z_i = <D_i, e^{B-b_i} (K dH')_i>: what the gradient of the end state says of row i's writing.
/// From D in fp32: rounding it would be the largest error of dg in bf16. Fills scratch.d_rows too.
/// reads: e^{B-b} K dH', of which nothing is read where dH' is zero.
template <typename Engine>
HCP_STAGE void sum_writes(ChunkSizes sizes,
                          const KeyChunk<Engine>& keys,
                          TokenRows<float> new_values,
                          TokenRows<float> reads,
                          const State<Engine>& gradient,
                          BackwardScratch<Engine>& scratch) {
    const int elements = BackwardScratch<Engine>::value_elements(sizes);
    for (int i = 0; i < keys.rows; ++i) {
        const float* read = reads.row(i);
        Vec sum = {};
        for (int j = 0; j < sizes.values; j += 2 * kLanes) {
            Vec pair[2];
            new_values.load_pair(i, j, pair);
            store_elements<Engine>(scratch.d_rows + i * elements + j, pair);
            sum += pair[0] * load(read + j);
            sum += pair[1] * load(read + j + kLanes);
        }
        scratch.after[i] = gradient.zero ? 0.0F : sum_lanes(sum);
    }
}

/// scratch.dots, reads and writes from dO, dR, D, H and dH', of which both states lie transposed.
/// state: right operand H^T, depth V; null for zeros.
template <typename Engine>
HCP_STAGE void gradient_products(ChunkSizes sizes,
                                 const KeyChunk<Engine>& keys,
                                 const std::uint32_t* state,
                                 const State<Engine>& gradient,
                                 BackwardScratch<Engine>& scratch) {
    const int elements = BackwardScratch<Engine>::value_elements(sizes);
    const int depth = sizes.values / Engine::kPerUnit;
    const auto whole = [&](int) { return DepthRange{0, depth}; };
    const int panel = depth * kPanel;
    const auto into = [](float* to, int row) {
        return [=](int i, int j, Vec first, Vec second) {
            store(to + i * row + j, first);
            store(to + (i + 1) * row + j, second);
        };
    };
    pack_columns_as_depth<Engine>(scratch.d_rows, elements, keys.rows, sizes.values,
                                  scratch.d_columns, panel);
    const LeftOperand rows = rows_left<Engine>(scratch.rows, elements);
    Engine::multiply({.left = rows,
                      .right = {scratch.d_columns, panel},
                      .rows = 2 * keys.rows,
                      .columns = round_up(keys.rows, kPanel),
                      .ahead = keys.ahead,
                      .triangle = keys.rows},
                     whole, into(scratch.dots, sizes.token_row));
    if (state != nullptr) {
        Engine::multiply({.left = rows,
                          .right = {state, panel},
                          .rows = 2 * keys.rows,
                          .columns = sizes.keys,
                          .ahead = keys.ahead},
                         whole, into(scratch.reads, sizes.key_row));
    }
    if (!gradient.zero) {
        Engine::multiply({.left = rows_left<Engine>(scratch.d_rows, elements),
                          .right = gradient.operand(sizes.transposed()),
                          .rows = keys.rows,
                          .columns = sizes.keys,
                          .ahead = keys.ahead},
                         whole, into(scratch.writes, sizes.key_row));
    }
}

}  // namespace hybridcp::HCP_ISA
