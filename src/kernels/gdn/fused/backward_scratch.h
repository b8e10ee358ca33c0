// What the backward pass of a chunk keeps and works in.
#pragma once

#include "kernels/gdn/fused/forward_step.h"

namespace hybridcp::HCP_ISA {

/// The state at the start of a chunk, transposed.
template <typename Engine>
struct ChunkRecord {
    float* state = nullptr;   // H^T, as State::values
    bool zero_state = false;  // H is 0

    ChunkRecord() = default;
    ChunkRecord(Workspace& space, const ChunkSizes& sizes)
        : state(space.take<float>(State<Engine>::size(sizes))) {}

    /// Right operand H^T, null for zeros; `packed`: where pack_states has it if H itself is none.
    [[nodiscard]] const std::uint32_t* operand(const std::uint32_t* packed) const {
        if (zero_state) {
            return nullptr;
        }
        return Engine::kPerUnit == 2 ? packed : as_units(state);
    }
};

/// Sums over the value heads of a key head, in fp32.
struct KeyGradients {
    float *dq, *dk;  // [C, K] of the normalised q and k
    float* dp;       // [2C, C] dP, then dN + dN^T
    float* dn;       // [C, C]

    KeyGradients(Workspace& space, const ChunkSizes& sizes) {
        dq = space.take<float>(sizes.tokens * sizes.key_row);
        dk = space.take<float>(sizes.tokens * sizes.key_row);
        dp = space.take<float>(2 * sizes.tokens * sizes.token_row);
        dn = space.take<float>(sizes.tokens * sizes.token_row);
    }
};

template <typename Engine>
struct BackwardScratch {
    using Element = typename Engine::Element;
    float* solved;                    // [C, V] dD, then dR
    Element* rows;                    // [2C, V] dO, then dR: left operands
    Element* d_rows;                  // [C, V] D
    std::uint32_t* d_o_depth;         // right operand, depth C: dO
    std::uint32_t* depth;             // right operand, depth 2C: s gamma dO, then -gamma beta dR
    float* read;                      // [C, C] P
    std::uint32_t* read_transposed;   // left operand P^T
    Element* pair_rows;               // [C, C] dP: left operand
    std::uint32_t* pairs_transposed;  // left operand [dP; dN + dN^T]^T
    std::uint32_t* d_columns;         // right operand of D^T: depth V, columns C
    float* dots;                      // [2C, C] dO D^T, then dR D^T
    float* reads;                     // [2C, a panel of K] dO H^T, then dR H^T
    float* writes;                    // [C, a panel of K] D dH'^T
    std::uint32_t* state_operand;     // right operand H^T, depth V, if H itself is none
    std::uint32_t* gradient_operand;  // right operand dH', depth K
    std::uint32_t *factors, *solved_units;  // of the solve
    std::uint32_t* left;                    // for tiles: what updates states, as a left operand
    double *row_sums, *column_sums;         // [C] of N
    float *crossing, *after;                // [C] i + e, and z
    // [C, kLanes] sums whose lanes are not added up: <q, dq>, <k, erased>, z.
    float *q_lanes, *k_lanes, *after_lanes;

    /// Stride of rows of V in elements.
    static int value_elements(const ChunkSizes& sizes) {
        return sizes.values + 16 * Engine::kPerUnit;
    }

    BackwardScratch(Workspace& space, const ChunkSizes& sizes) {
        const int c = sizes.tokens;
        solved = space.take<float>(c * sizes.value_row);
        rows = space.take<Element>(2 * c * value_elements(sizes));
        d_rows = space.take<Element>(c * value_elements(sizes));
        d_o_depth = space.take<std::uint32_t>(c * sizes.values / Engine::kPerUnit);
        depth = space.take<std::uint32_t>(2 * c * sizes.values / Engine::kPerUnit);
        read = space.take<float>(c * sizes.token_row);
        read_transposed =
            space.take<std::uint32_t>(transposed_left_units<Engine>(c, round_up(c, kPanel)));
        pairs_transposed =
            space.take<std::uint32_t>(transposed_left_units<Engine>(2 * c, round_up(c, kPanel)));
        d_columns = space.take<std::uint32_t>(round_up(c, kPanel) * sizes.values);
        pair_rows = space.take<Element>(c * ForwardScratch<Engine>::read_row(sizes));
        dots = space.take<float>(2 * c * sizes.token_row);
        reads = space.take<float>(2 * c * kPanel);
        writes = space.take<float>(c * kPanel);
        state_operand = Engine::kPerUnit == 2
                            ? space.take<std::uint32_t>(State<Engine>::transposed_units(sizes))
                            : nullptr;
        gradient_operand = space.take<std::uint32_t>(State<Engine>::transposed_units(sizes));
        factors = space.take<std::uint32_t>(BlockSystem<Engine>::factor_units());
        solved_units = space.take<std::uint32_t>(BlockSystem<Engine>::solved_units(sizes.values));
        left = Engine::kTiles
                   ? space.take<std::uint32_t>(transposed_left_units<Engine>(2 * c, sizes.values))
                   : nullptr;
        row_sums = space.take<double>(c);
        column_sums = space.take<double>(c);
        crossing = space.take<float>(c);
        after = space.take<float>(c);
        q_lanes = space.take<float>(c * kLanes);
        k_lanes = space.take<float>(c * kLanes);
        after_lanes = space.take<float>(c * kLanes);
    }
};

/// Rows of V as left operands.
template <typename Engine, typename Input>
HCP_STAGE void pack_rows(ChunkSizes sizes,
                         int rows,
                         TokenRows<Input> from,
                         typename Engine::Element* to) {
    const int elements = BackwardScratch<Engine>::value_elements(sizes);
    for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < sizes.values; j += 2 * kLanes) {
            Vec pair[2];
            from.load_pair(i, j, pair);
            store_elements<Engine>(to + i * elements + j, pair);
        }
    }
}

}  // namespace hybridcp::HCP_ISA
