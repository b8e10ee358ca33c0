// One chunk of one value head, backward: docs/kernels.md, "Backward". Legend: H the state at the
// chunk's start, dH' the gradient of the state at its end.
#pragma once

#include "kernels/gdn/fused/backward_scratch.h"

namespace hybridcp::HCP_ISA {

/// e^{B-b} K dH' into scratch.solved, with dH' as a right operand, depth K.
template <typename Engine>
HCP_STAGE void read_gradient(ChunkSizes sizes,
                             const KeyChunk<Engine>& keys,
                             HeadChunk head,
                             RightOperand gradient,
                             BackwardScratch<Engine>& scratch) {
    const int row = sizes.value_row;
    float* x = scratch.solved;
    const int depth = sizes.keys / Engine::kPerUnit;
    Engine::multiply(
        {.left = rows_left<Engine>(keys.k_rows, keys.element_row(sizes)),
         .right = gradient,
         .rows = keys.rows,
         .columns = sizes.values,
         .ahead = keys.ahead},
        [&](int) { return DepthRange{0, depth}; },
        [&](int i, int j, Vec first, Vec second) {
            store(x + i * row + j, head.to_end[i] * first);
            store(x + (i + 1) * row + j, head.to_end[i + 1] * second);
        });
}

/// What products read of P and of dO: rows, depth, and s gamma dO in the first half of
/// scratch.depth.
template <typename Engine, typename Input>
HCP_STAGE void pack_output_gradient(const GdnProblemView& problem,
                                    ChunkSizes sizes,
                                    const KeyChunk<Engine>& keys,
                                    HeadChunk head,
                                    TokenRows<Input> d_o,
                                    BackwardScratch<Engine>& scratch) {
    for (int i = 0; i < keys.rows; ++i) {
        for (int j = 0; j < keys.rows; j += kLanes) {
            const int at = i * sizes.token_row + j;
            store(scratch.read + at, j <= i ? load(head.gam + at) * load(keys.qk + at) : Vec{});
        }
    }
    pack_transposed_left<Engine>(scratch.read, sizes.token_row, keys.rows, keys.rows,
                                 scratch.read_transposed);
    const int elements = BackwardScratch<Engine>::value_elements(sizes);
    const int panel = keys.rows / Engine::kPerUnit * kPanel;
    auto* rows = scratch.rows;
    std::uint32_t *d_o_depth = scratch.d_o_depth, *depth = scratch.depth;
    for (int i = 0, count = keys.rows; i < count; i += 2) {
        const Vec first_factor = broadcast(problem.scale * head.gamma[i]);
        const Vec second_factor = broadcast(problem.scale * head.gamma[i + 1]);
        for (int j = 0; j < sizes.values; j += 2 * kLanes) {
            Vec first[2], second[2];
            d_o.load_pair(i, j, first);
            d_o.load_pair(i + 1, j, second);
            store_elements<Engine>(rows + i * elements + j, first);
            store_elements<Engine>(rows + (i + 1) * elements + j, second);
            store_row_pair<Engine>(unit_of_row<Engine>(d_o_depth, panel, i, j), first, second);
            for (int n = 0; n < 2; ++n) {
                first[n] *= first_factor;
                second[n] *= second_factor;
            }
            store_row_pair<Engine>(unit_of_row<Engine>(depth, 2 * panel, i, j), first, second);
        }
    }
}

/// dR = T^T (P^T dO + e^{B-b} K dH') in place of what read_gradient left, and what products read
/// of it; pack_output_gradient comes before. put(i, j, v): a vector of dR.
template <typename Engine, typename Put>
HCP_STAGE void solved_gradient(ChunkSizes sizes,
                               const KeyChunk<Engine>& keys,
                               HeadChunk head,
                               const State<Engine>& gradient,
                               Put put,
                               BackwardScratch<Engine>& scratch) {
    const int row = sizes.value_row;
    float* x = scratch.solved;
    const BlockSystem<Engine> system{.system = head.system,
                                     .system_row = sizes.token_row,
                                     .rows = keys.rows,
                                     .factors = scratch.factors,
                                     .solved = scratch.solved_units,
                                     .ahead = keys.ahead};
    system.pack_factors_transposed();
    const int panel = keys.rows / Engine::kPerUnit * kPanel;
    const Product product{
        .left = transposed_left<Engine>(scratch.read_transposed, keys.rows, keys.rows),
        .right = {scratch.d_o_depth, panel},
        .rows = keys.rows,
        .columns = sizes.values,
        .ahead = keys.ahead};
    const auto depth_of = [&](int i) {  // P^T is upper triangular
        return DepthRange{i / Engine::kPerUnit, keys.rows / Engine::kPerUnit};
    };
    if (gradient.zero) {
        Engine::multiply_to(product, depth_of, x, row);
    } else {
        Engine::template multiply_to<true>(product, depth_of, x, row);
    }
    const int elements = BackwardScratch<Engine>::value_elements(sizes);
    auto* d_rows = scratch.rows + keys.rows * elements;
    std::uint32_t* depth = unit_of_row<Engine>(scratch.depth, 2 * panel, keys.rows, 0);
    solve_blocks_transposed(
        system, x, row, sizes.values, [&](int i, int j, const Vec* first, const Vec* second) {
            auto* to = d_rows + i * elements + j;
            store_elements<Engine>(to, first);
            store_elements<Engine>(to + elements, second);
            const float factor = -head.gamma[i] * head.beta[i];
            const float next_factor = -head.gamma[i + 1] * head.beta[i + 1];
            const Vec scaled[2] = {factor * first[0], factor * first[1]};
            const Vec next[2] = {next_factor * second[0], next_factor * second[1]};
            store_row_pair<Engine>(unit_of_row<Engine>(depth, 2 * panel, i, j), scaled, next);
            for (int n = 0; n < 2; ++n) {
                put(i, j + n * kLanes, first[n]);
                put(i + 1, j + n * kLanes, second[n]);
            }
        });
}

/// dH = e^B dH' + (s gamma Q)^T dO - (gamma beta K)^T dR, with dH' at `old`.
template <bool Transposed, typename Engine>
HCP_STAGE void update_gradient(ChunkSizes sizes,
                               const KeyChunk<Engine>& keys,
                               HeadChunk head,
                               const float* old,
                               State<Engine>& gradient,
                               const BackwardScratch<Engine>& scratch) {
    const int depth = 2 * keys.rows;
    RightOperand right{scratch.depth, depth / Engine::kPerUnit * kPanel};
    LeftOperand left = keys.transposed_operand(sizes);
    if constexpr (Transposed) {
        left = left_of_right<Engine>(right, depth, sizes.values, scratch.left);
        right = {keys.tokens, keys.tokens_panel()};
        sizes = sizes.transposed();
    }
    update_state(sizes, old, gradient, head.decay,
                 {.left = left,
                  .right = right,
                  .rows = sizes.keys,
                  .columns = sizes.values,
                  .ahead = keys.ahead},
                 depth);
}

}  // namespace hybridcp::HCP_ISA
