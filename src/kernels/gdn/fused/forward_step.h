// One chunk of one value head, forward: docs/kernels.md, "Forward".
#pragma once

#include "kernels/gdn/fused/state_writes.h"

namespace hybridcp::HCP_ISA {

/// D = T beta (V - gamma K H) into scratch.values and scratch.writes; scratch.depth for `Outputs`.
/// value(i, j): a vector of V; put(i, j, v): one of D.
template <bool Outputs, typename Engine, typename Value, typename Put>
HCP_STAGE void new_values(ChunkSizes sizes,
                          const KeyChunk<Engine>& keys,
                          HeadChunk head,
                          const State<Engine>& state,
                          Value value,
                          Put put,
                          ForwardScratch<Engine>& scratch) {
    const int row = sizes.value_row;
    float* values = scratch.values;
    const BlockSystem<Engine> system{.system = head.system,
                                     .system_row = sizes.token_row,
                                     .rows = keys.rows,
                                     .factors = scratch.factors,
                                     .solved = scratch.solved,
                                     .ahead = keys.ahead};
    system.pack_factors();
    if (state.zero) {
        for (int i = 0; i < keys.rows; ++i) {
            const Vec beta = broadcast(head.beta[i]);
            for (int j = 0; j < sizes.values; j += kLanes) {
                store(values + i * row + j, beta * value(i, j));
            }
        }
    } else {
        const int depth = sizes.keys / Engine::kPerUnit;
        Engine::multiply(
            {.left = rows_left<Engine>(keys.k_rows, keys.element_row(sizes)),
             .right = state.operand(sizes),
             .rows = keys.rows,
             .columns = sizes.values,
             .ahead = keys.ahead},
            [&](int) { return DepthRange{0, depth}; },
            [&](int i, int j, Vec first, Vec second) {
                float* to = values + i * row + j;
                store(to, head.beta[i] * (value(i, j) - head.gamma[i] * first));
                store(to + row, head.beta[i + 1] * (value(i + 1, j) - head.gamma[i + 1] * second));
            });
    }
    const int panel = keys.rows / Engine::kPerUnit * kPanel;
    std::uint32_t *depth_units = scratch.depth, *writes = scratch.writes;
    solve_blocks(
        system, values, row, sizes.values, [&](int i, int j, const Vec* first, const Vec* second) {
            if constexpr (Outputs) {
                store_row_pair<Engine>(unit_of_row<Engine>(depth_units, panel, i, j), first,
                                       second);
            }
            for (int n = 0; n < 2; ++n) {
                put(i, j + n * kLanes, first[n]);
                put(i + 1, j + n * kLanes, second[n]);
            }
            const Vec decayed[2] = {head.to_end[i] * first[0], head.to_end[i] * first[1]};
            const Vec next[2] = {head.to_end[i + 1] * second[0], head.to_end[i + 1] * second[1]};
            store_row_pair<Engine>(unit_of_row<Engine>(writes, panel, i, j), decayed, next);
        });
}

/// O = s gamma Q H + P D to rows of the caller's.
template <typename Engine, typename Output, bool Streams>
HCP_STAGE void outputs(const GdnProblemView& problem,
                       ChunkSizes sizes,
                       const KeyChunk<Engine>& keys,
                       HeadChunk head,
                       const State<Engine>& state,
                       ForwardScratch<Engine>& scratch,
                       OutputRows<Output, Streams> to) {
    const int read_row = scratch.read_row(sizes);
    for (int i = 0; i < keys.rows; ++i) {
        for (int j = 0; j < keys.rows; j += kLanes) {
            const int at = i * sizes.token_row + j;
            store(scratch.read_rows + i * read_row + j,
                  j <= i ? load(head.gam + at) * load(keys.qk + at) : Vec{});
        }
    }
    const int row = sizes.value_row;
    float* o = scratch.outputs;
    const float scale = problem.scale;
    if (!state.zero) {
        const int depth = sizes.keys / Engine::kPerUnit;
        Engine::multiply(
            {.left = rows_left<Engine>(keys.q_rows, keys.element_row(sizes)),
             .right = state.operand(sizes),
             .rows = keys.rows,
             .columns = sizes.values,
             .ahead = keys.ahead},
            [&](int) { return DepthRange{0, depth}; },
            [&](int i, int j, Vec first, Vec second) {
                store(o + i * row + j, scale * head.gamma[i] * first);
                store(o + (i + 1) * row + j, scale * head.gamma[i + 1] * second);
            });
    }
    const int panel = keys.rows / Engine::kPerUnit * kPanel;
    const bool add = !state.zero;
    Engine::multiply(
        {.left = rows_left<Engine>(scratch.read_rows, read_row),
         .right = {scratch.depth, panel},
         .rows = keys.rows,
         .columns = sizes.values,
         .ahead = keys.ahead},
        [&](int i) {  // P is lower triangular
            return DepthRange{0, round_up(i + Engine::kRows, Engine::kPerUnit) / Engine::kPerUnit};
        },
        [&](int i, int j, Vec first, Vec second) {
            const float* before = o + i * row + j;
            to.put(i, j, add ? load(before) + first : first);
            to.put(i + 1, j, add ? load(before + row) + second : second);
        });
}

}  // namespace hybridcp::HCP_ISA
