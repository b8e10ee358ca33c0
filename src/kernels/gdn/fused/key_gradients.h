// Gradients of q and k of a chunk, once its value heads are summed.
#pragma once

#include "kernels/gdn/fused/backward_scratch.h"

namespace hybridcp::HCP_ISA {

/// dx of x / |x|, rounded to the output's type. `dx` is the gradient of the normalised row.
template <typename Output>
HCP_STAGE void store_key_gradient(ChunkSizes sizes,
                                  TokenRows<Output> x,
                                  const float* inverse,
                                  bool normalised,
                                  const float* dx,
                                  OutputRows<Output> to) {
    for (int i = 0; i < to.count; ++i) {
        const float* dx_row = dx + i * sizes.key_row;
        const Output* x_row = x.row(i);
        const float factor = inverse[i];
        const Vec along =
            normalised ? broadcast(factor * factor * dot(dx_row, x_row, sizes.keys)) : Vec{};
        for (int c = 0; c < sizes.keys; c += kLanes) {
            to.put(i, c, factor * (load(dx_row + c) - along * load(x_row + c)));
        }
    }
}

/// dP and [dP; dN + dN^T]^T as left operands.
template <typename Engine>
HCP_STAGE void pack_pairs(ChunkSizes sizes,
                          const KeyChunk<Engine>& keys,
                          KeyGradients sums,
                          BackwardScratch<Engine>& scratch) {
    const int row = sizes.token_row;
    float* symmetric = sums.dp + keys.rows * row;
    transpose_units(
        keys.rows, keys.rows,
        [&](int i, int j) { return std::bit_cast<VecUint>(load(sums.dn + i * row + j)); },
        [&](int j, int i, VecUint v) {
            store(symmetric + j * row + i, std::bit_cast<Vec>(v) + load(sums.dn + j * row + i));
        });
    const int elements = ForwardScratch<Engine>::read_row(sizes);
    for (int i = 0; i < keys.rows; ++i) {
        for (int j = 0; j < keys.rows; j += kLanes) {
            store(scratch.pair_rows + i * elements + j, load(sums.dp + i * row + j));
        }
    }
    pack_transposed_left<Engine>(sums.dp, row, 2 * keys.rows, keys.rows, scratch.pairs_transposed);
}

/// Adds dP K to dq and dP^T Q + (dN + dN^T) K to dk, in a panel of columns from k on.
template <typename Engine>
HCP_STAGE void add_pair_products(ChunkSizes sizes,
                                 const KeyChunk<Engine>& keys,
                                 const BackwardScratch<Engine>& scratch,
                                 KeyGradients sums,
                                 int k) {
    const int half = keys.rows / Engine::kPerUnit;
    const RightOperand tokens = RightOperand{keys.tokens, keys.tokens_panel()}.panel_at(k);
    Engine::template multiply_to<true>(
        {.left = rows_left<Engine>(scratch.pair_rows, ForwardScratch<Engine>::read_row(sizes)),
         .right = {tokens.units + half * kPanel, 0},
         .rows = keys.rows,
         .columns = kPanel,
         .ahead = keys.ahead},
        [](int i) {
            return DepthRange{0, round_up(i + Engine::kRows, Engine::kPerUnit) / Engine::kPerUnit};
        },
        sums.dq + k, sizes.key_row);
    Engine::template multiply_to<true>(
        {.left = transposed_left<Engine>(scratch.pairs_transposed, 2 * keys.rows, keys.rows),
         .right = tokens,
         .rows = keys.rows,
         .columns = kPanel,
         .ahead = keys.ahead},
        [=](int i) {  // dP^T is upper triangular
            return DepthRange{i / Engine::kPerUnit, 2 * half};
        },
        sums.dk + k, sizes.key_row);
}

}  // namespace hybridcp::HCP_ISA
