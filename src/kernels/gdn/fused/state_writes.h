// What a chunk writes to the state: H' = e^B H + (e^{B-b} K)^T D.
#pragma once

#include "kernels/gdn/fused/block_solve.h"
#include "kernels/gdn/fused/head_chunk.h"
#include "kernels/gdn/fused/state_products.h"

namespace hybridcp::HCP_ISA {

template <typename Engine>
struct ForwardScratch {
    using Element = typename Engine::Element;
    float* values;                    // [C, V] D
    float* outputs;                   // [C, V]
    Element* read_rows;               // [C, C] P
    std::uint32_t* depth;             // right operand, depth C: D
    std::uint32_t* writes;            // right operand, depth C: e^{B-b} D
    std::uint32_t *factors, *solved;  // of the solve

    ForwardScratch(Workspace& space, ChunkSizes sizes) {
        values = space.take<float>(sizes.tokens * sizes.value_row);
        outputs = space.take<float>(sizes.tokens * sizes.value_row);
        read_rows = space.take<Element>(sizes.tokens * read_row(sizes));
        depth = space.take<std::uint32_t>(sizes.tokens * sizes.values / Engine::kPerUnit);
        writes = space.take<std::uint32_t>(sizes.tokens * sizes.values / Engine::kPerUnit);
        factors = space.take<std::uint32_t>(BlockSystem<Engine>::factor_units());
        solved = space.take<std::uint32_t>(BlockSystem<Engine>::solved_units(sizes.values));
    }

    static int read_row(ChunkSizes sizes) { return sizes.tokens + 16 * Engine::kPerUnit; }
};

/// e^{B-b} D into scratch.writes.
template <typename Engine>
HCP_STAGE void pack_writes(ChunkSizes sizes,
                           const KeyChunk<Engine>& keys,
                           HeadChunk head,
                           TokenRows<float> new_values,
                           ForwardScratch<Engine>& scratch) {
    const int panel = keys.rows / Engine::kPerUnit * kPanel;
    std::uint32_t* writes = scratch.writes;
    for (int i = 0; i < keys.rows; i += 2) {
        for (int j = 0; j < sizes.values; j += 2 * kLanes) {
            Vec first[2], second[2];
            new_values.load_pair(i, j, first);
            new_values.load_pair(i + 1, j, second);
            for (int n = 0; n < 2; ++n) {
                first[n] *= head.to_end[i];
                second[n] *= head.to_end[i + 1];
            }
            store_row_pair<Engine>(unit_of_row<Engine>(writes, panel, i, j), first, second);
        }
    }
}

/// H' = e^B H + (e^{B-b} K)^T D, with H at `old` and scratch.writes.
template <bool WithOperand = true, typename Engine>
HCP_STAGE void write_values(ChunkSizes sizes,
                            const KeyChunk<Engine>& keys,
                            HeadChunk head,
                            const float* old,
                            State<Engine>& state,
                            ForwardScratch<Engine>& scratch) {
    update_state<WithOperand>(sizes, old, state, head.decay,
                              {.left = keys.transposed_operand(sizes),
                               .right = {scratch.writes, keys.rows / Engine::kPerUnit * kPanel},
                               .rows = sizes.keys,
                               .columns = sizes.values,
                               .ahead = keys.ahead},
                              keys.rows);
}

/// The same for a state that lies transposed and is no operand yet; `copy`: as in left_of_right.
template <typename Engine>
HCP_STAGE void write_values_transposed(ChunkSizes sizes,
                                       const KeyChunk<Engine>& keys,
                                       HeadChunk head,
                                       const float* old,
                                       State<Engine>& state,
                                       ForwardScratch<Engine>& scratch,
                                       std::uint32_t* copy) {
    const RightOperand writes{scratch.writes, keys.rows / Engine::kPerUnit * kPanel};
    update_state<false>(sizes.transposed(), old, state, head.decay,
                        {.left = left_of_right<Engine>(writes, keys.rows, sizes.values, copy),
                         .right = {keys.tokens, keys.tokens_panel()},
                         .rows = sizes.values,
                         .columns = sizes.keys,
                         .ahead = keys.ahead},
                        keys.rows);
}

}  // namespace hybridcp::HCP_ISA
