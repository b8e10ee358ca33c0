// Gradients of q and k of a chunk, once its value heads are summed.
#pragma once

#include "kernels/gdn/fused/backward_scratch.h"

namespace hybridcp::HCP_ISA {

/// dx of x / |x|, rounded to the output's type. `dx` is the gradient of the normalised `x`.
template <typename Output>
HCP_STAGE void store_key_gradient(ChunkSizes sizes,
                                  const float* x,
                                  const float* inverse,
                                  bool normalised,
                                  const float* dx,
                                  OutputRows<Output> to) {
    for (int i = 0; i < to.count; ++i) {
        const float *x_row = x + i * sizes.key_row, *dx_row = dx + i * sizes.key_row;
        const Vec along = normalised ? broadcast(dot(x_row, dx_row, sizes.keys)) : Vec{};
        for (int c = 0; c < sizes.keys; c += kLanes) {
            to.put(i, c, inverse[i] * (load(dx_row + c) - along * load(x_row + c)));
        }
    }
}

/// Adds dP K to dq and dP^T Q + (dN + dN^T) K to dk.
template <typename Engine>
HCP_STAGE void add_pair_products(ChunkSizes sizes,
                                 const KeyChunk<Engine>& keys,
                                 BackwardScratch<Engine>& scratch,
                                 KeyGradients& sums) {
    const int row = sizes.token_row;
    float* symmetric = sums.dp + keys.rows * row;
    transpose_units(
        keys.rows, keys.rows,
        [&](int i, int j) { return std::bit_cast<VecUint>(load(sums.dn + i * row + j)); },
        [&](int j, int i, VecUint v) {
            store(symmetric + j * row + i, std::bit_cast<Vec>(v) + load(sums.dn + j * row + i));
        });
    const int elements = ForwardScratch<Engine>::read_row(sizes);
    auto* dp_rows = scratch.rows;
    for (int i = 0; i < keys.rows; ++i) {
        for (int j = 0; j < keys.rows; j += kLanes) {
            store(dp_rows + i * elements + j, load(sums.dp + i * row + j));
        }
    }
    const auto add_to = [&](float* to) {
        return [=](int i, int j, Vec first, Vec second) {
            float* at = to + i * sizes.key_row + j;
            store(at, load(at) + first);
            store(at + sizes.key_row, load(at + sizes.key_row) + second);
        };
    };
    const int half = keys.rows / Engine::kPerUnit;
    Engine::multiply(
        {.left = rows_left<Engine>(dp_rows, elements),
         .right = {keys.tokens + half * kPanel, keys.tokens_panel()},
         .rows = keys.rows,
         .columns = sizes.keys,
         .ahead = keys.ahead},
        [&](int i) {
            return DepthRange{0, round_up(i + Engine::kRows, Engine::kPerUnit) / Engine::kPerUnit};
        },
        add_to(sums.dq));
    pack_transposed_left<Engine>(sums.dp, row, 2 * keys.rows, keys.rows, scratch.pairs_transposed);
    Engine::multiply(
        {.left = transposed_left<Engine>(scratch.pairs_transposed, 2 * keys.rows, keys.rows),
         .right = {keys.tokens, keys.tokens_panel()},
         .rows = keys.rows,
         .columns = sizes.keys,
         .ahead = keys.ahead},
        [&](int i) {  // dP^T is upper triangular
            return DepthRange{i / Engine::kPerUnit, 2 * half};
        },
        add_to(sums.dk));
}

}  // namespace hybridcp::HCP_ISA
