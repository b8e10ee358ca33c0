// States that lie transposed, [V, K]: backward reads H^T and dH'^T twice as often as dH'.
#pragma once

#include "kernels/gdn/fused/state.h"

namespace hybridcp::HCP_ISA {

/// `state` from the first `key_dim` rows and `columns` columns of a matrix [K, V]; null for zeros.
/// sizes: of the transposed state, whose rows are V.
template <typename Engine>
HCP_STAGE void load_transposed(ChunkSizes sizes,
                               const float* from,
                               int row_stride,
                               int key_dim,
                               int columns,
                               State<Engine>& state) {
    state.zero = from == nullptr;
    float* values = state.values;
    transpose_units(
        sizes.values, sizes.keys,
        [&](int k, int v) {
            const int rest = columns - v;
            if (from == nullptr || k >= key_dim || rest <= 0) {
                return VecUint{};
            }
            const float* row = from + static_cast<std::int64_t>(k) * row_stride + v;
            return std::bit_cast<VecUint>(rest >= kLanes ? load(row) : load_part(row, rest));
        },
        [&](int v, int k, VecUint column) {
            store(State<Engine>::at(values, sizes, v, k), std::bit_cast<Vec>(column));
        });
    if (state.right != nullptr) {
        for (int i = 0; i < sizes.keys; i += 2) {
            for (int j = 0; j < sizes.values; j += kLanes) {
                const float* at = State<Engine>::at(values, sizes, i, j);
                state.set(sizes, i, j, load(at), load(at + kPanel));
            }
        }
    }
}

/// The reverse.
template <typename Engine>
HCP_STAGE void store_transposed(ChunkSizes sizes,
                                const State<Engine>& state,
                                float* to,
                                int row_stride,
                                int key_dim,
                                int columns) {
    const float* values = state.values;
    transpose_units(
        sizes.keys, sizes.values,
        [&](int v, int k) {
            return std::bit_cast<VecUint>(load(State<Engine>::at(values, sizes, v, k)));
        },
        [&](int k, int v, VecUint column) {
            if (k < key_dim) {
                float* row = to + static_cast<std::int64_t>(k) * row_stride;
                store_columns(row, v, columns, std::bit_cast<Vec>(column));
            }
        });
}

}  // namespace hybridcp::HCP_ISA
