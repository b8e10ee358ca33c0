// One chunk of one value head, forward: docs/kernels.md, "Forward".
#pragma once

#include "kernels/gdn/fused/head_chunk.h"
#include "kernels/gdn/fused/solve.h"
#include "kernels/gdn/fused/state_products.h"

namespace hybridcp::HCP_ISA {

template <typename Engine>
struct ForwardScratch {
    using Element = typename Engine::Element;
    float* values;         // [C, V] V, then D
    float* outputs;        // [C, V]
    Element* read_rows;    // [C, C] P
    std::uint32_t* depth;  // right operand of D, or of its decayed rows
    float* ones;           // [C]

    ForwardScratch(Workspace& space, const ChunkSizes& sizes) {
        values = space.take<float>(sizes.tokens * sizes.value_row);
        outputs = space.take<float>(sizes.tokens * sizes.value_row);
        read_rows = space.take<Element>(sizes.tokens * read_row(sizes));
        depth = space.take<std::uint32_t>(sizes.tokens * sizes.values / Engine::kPerUnit);
        ones = space.take<float>(sizes.tokens);
    }

    static int read_row(const ChunkSizes& sizes) { return sizes.tokens + 16 * Engine::kPerUnit; }
};

/// D = T beta (V - gamma K H) in place of V.
template <typename Engine>
HCP_STAGE void new_values(const ChunkSizes& sizes,
                          const KeyChunk<Engine>& keys,
                          const HeadChunk& head,
                          const State<Engine>& state,
                          float* values) {
    const int row = sizes.value_row;
    if (state.zero) {
        for (int i = 0; i < keys.rows; ++i) {
            const Vec beta = broadcast(head.beta[i]);
            for (int j = 0; j < sizes.values; j += kLanes) {
                store(values + i * row + j, beta * load(values + i * row + j));
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
                store(to, head.beta[i] * (load(to) - head.gamma[i] * first));
                store(to + row, head.beta[i + 1] * (load(to + row) - head.gamma[i + 1] * second));
            });
    }
    solve(head.system, sizes.token_row, values, row, keys.rows, sizes.values);
}

/// O = s gamma Q H + P D into scratch.outputs.
template <typename Engine>
HCP_STAGE void outputs(const GdnProblemView& problem,
                       const ChunkSizes& sizes,
                       const KeyChunk<Engine>& keys,
                       const HeadChunk& head,
                       const State<Engine>& state,
                       ForwardScratch<Engine>& scratch) {
    const int row = sizes.value_row;
    float* o = scratch.outputs;
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
                store(o + i * row + j, problem.scale * head.gamma[i] * first);
                store(o + (i + 1) * row + j, problem.scale * head.gamma[i + 1] * second);
            });
    }
    const int read_row = scratch.read_row(sizes);
    for (int i = 0; i < keys.rows; ++i) {
        for (int j = 0; j < keys.rows; j += kLanes) {
            const int at = i * sizes.token_row + j;
            store(scratch.read_rows + i * read_row + j, load(head.gam + at) * load(keys.qk + at));
        }
    }
    const int panel = keys.rows / Engine::kPerUnit * kPanel;
    pack_rows_as_depth<Engine>(scratch.values, row, scratch.ones, keys.rows, sizes.values,
                               scratch.depth, panel);
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
            float* to = o + i * row + j;
            store(to, add ? load(to) + first : first);
            store(to + row, add ? load(to + row) + second : second);
        });
}

/// H' = e^B H + (e^{B-b} K)^T D, with H at `old` and D at `values`.
template <typename Engine>
HCP_STAGE void write_values(const ChunkSizes& sizes,
                            const KeyChunk<Engine>& keys,
                            const HeadChunk& head,
                            const float* old,
                            const float* values,
                            State<Engine>& state,
                            ForwardScratch<Engine>& scratch) {
    const int panel = keys.rows / Engine::kPerUnit * kPanel;
    pack_rows_as_depth<Engine>(values, sizes.value_row, head.to_end, keys.rows, sizes.values,
                               scratch.depth, panel);
    update_state(sizes, old, state, head.decay,
                 {.left = transposed_left<Engine>(keys.transposed, keys.rows, sizes.keys),
                  .right = {scratch.depth, panel},
                  .rows = sizes.keys,
                  .columns = sizes.values,
                  .ahead = keys.ahead},
                 keys.rows);
}

}  // namespace hybridcp::HCP_ISA
