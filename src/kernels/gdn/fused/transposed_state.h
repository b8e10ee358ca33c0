// States that lie transposed, [V, K]: backward reads H^T and dH'^T twice as often as dH'.
#pragma once

#include "kernels/gdn/fused/state.h"

namespace hybridcp::HCP_ISA {

/// `state` with row k, columns v .. of a state [K, V] at load(k, v). sizes: of the transposed
/// state, whose rows are V.
template <typename Engine, typename Load>
HCP_INLINE void set_transposed(const ChunkSizes& sizes, Load load_row, State<Engine>& state) {
    const State<Engine> written = state;  // no store can alias it
    for (int k = 0; k < sizes.values; k += kLanes) {
        for (int v = 0; v < sizes.keys; v += kLanes) {
            VecUint rows[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                rows[i] = std::bit_cast<VecUint>(load_row(k + i, v));
            }
            transpose_lanes(rows);
            State<Engine> target = written;
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; i += 2) {
                const Vec first = std::bit_cast<Vec>(rows[i]);
                const Vec second = std::bit_cast<Vec>(rows[i + 1]);
                if (target.right != nullptr) {
                    target.set(sizes, v + i, k, first, second);
                } else {
                    target.template set<false>(sizes, v + i, k, first, second);
                }
            }
        }
    }
}

/// From the first `key_dim` rows and `columns` columns of a matrix [K, V]; null for zeros.
template <typename Engine>
HCP_STAGE void load_transposed(ChunkSizes sizes,
                               const float* from,
                               int row_stride,
                               int key_dim,
                               int columns,
                               State<Engine>& state) {
    state.zero = from == nullptr;
    set_transposed<Engine>(
        sizes,
        [=](int k, int v) {
            const int rest = columns - v;
            if (from == nullptr || k >= key_dim || rest <= 0) {
                return Vec{};
            }
            const float* row = from + static_cast<std::int64_t>(k) * row_stride + v;
            return rest >= kLanes ? load(row) : load_part(row, rest);
        },
        state);
}

/// From the values of a state that is not transposed; null for zeros, of which none are set.
template <typename Engine>
HCP_STAGE void transpose_values(ChunkSizes sizes, const float* from, State<Engine>& state) {
    state.zero = from == nullptr;
    if (from != nullptr) {
        set_transposed<Engine>(
            sizes,
            [=, as_it_lies = sizes.transposed()](int k, int v) {
                return load(State<Engine>::at(from, as_it_lies, k, v));
            },
            state);
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
