// The state of one value head: fp32 in panels of columns, and what products read of it.
#pragma once

#include "kernels/gdn/fused/key_chunk.h"

namespace hybridcp::HCP_ISA {

template <typename Engine>
struct State {
    float* values;         // [V / 32][K][32]
    std::uint32_t* right;  // right operand, depth K, columns V; `values` itself for fp32; or null
    bool zero = true;      // nothing was written yet

    State() = default;
    /// Values alone, which no product reads.
    static State without_operand(float* of) {
        State state;
        state.values = of;
        state.right = nullptr;
        return state;
    }
    State(Workspace& space, const ChunkSizes& sizes) {
        values = space.take<float>(sizes.keys * sizes.values);
        right = reinterpret_cast<std::uint32_t*>(values);
        if constexpr (Engine::kPerUnit == 2) {
            right = space.take<std::uint32_t>(sizes.keys * sizes.values / 2);
        }
    }

    /// What is set from here on lies there.
    void move_to(float* other) {
        values = other;
        if constexpr (Engine::kPerUnit == 1) {
            right = reinterpret_cast<std::uint32_t*>(other);
        }
    }

    [[nodiscard]] RightOperand operand(const ChunkSizes& sizes) const {
        return {right, sizes.keys / Engine::kPerUnit * kPanel};
    }

    template <typename T>
    [[nodiscard]] static T* at(T* values, const ChunkSizes& sizes, std::int64_t k, std::int64_t v) {
        return values + (v / kPanel) * sizes.keys * kPanel + k * kPanel + v % kPanel;
    }

    /// i is even. Rows i and i + 1 of columns j .. of the state become first and second, in `right`
    /// too where there is one.
    template <bool WithOperand = true>
    HCP_INLINE void set(
        const ChunkSizes& sizes, std::int64_t i, std::int64_t j, Vec first, Vec second) {
        float* to = at(values, sizes, i, j);
        store(to, first);
        store(to + kPanel, second);
        if constexpr (Engine::kPerUnit == 2 && WithOperand) {
            store_units(
                right + (j / kPanel) * (sizes.keys / 2 * kPanel) + i * (kPanel / 2) + j % kPanel,
                pair_units(first, second));
        }
    }

    /// From the first `key_dim` rows and `columns` columns of a matrix; null for zeros.
    void load_from(ChunkSizes sizes, const float* from, int row_stride, int key_dim, int columns) {
        const bool all_zero = zero = from == nullptr;
        State target = *this;                      // no store can alias it
        for (int i = 0; i < sizes.keys; i += 2) {  // in the order of memory
            for (int j = 0; j < sizes.values; j += kLanes) {
                Vec rows[2] = {};
                for (int m = 0; m < 2; ++m) {
                    const int rest = columns - j;
                    if (!all_zero && i + m < key_dim && rest > 0) {
                        const float* row = from + static_cast<std::int64_t>(i + m) * row_stride + j;
                        rows[m] = rest >= kLanes ? load(row) : load_part(row, rest);
                    }
                }
                if (target.right != nullptr) {
                    target.set(sizes, i, j, rows[0], rows[1]);
                } else {
                    target.template set<false>(sizes, i, j, rows[0], rows[1]);
                }
            }
        }
    }

    void load_identity(const ChunkSizes& sizes) {
        load_from(sizes, nullptr, 0, 0, 0);
        zero = false;
        for (int i = 0; i < sizes.keys; i += 2) {
            const int j = i / kLanes * kLanes;
            Vec rows[2] = {};
            rows[0][i - j] = 1.0F;
            rows[1][i + 1 - j] = 1.0F;
            set(sizes, i, j, rows[0], rows[1]);
        }
    }

    void store_to(ChunkSizes sizes, float* to, int row_stride, int key_dim, int columns) const {
        const float* from = values;
        for (int i = 0; i < key_dim; ++i) {
            for (int j = 0; j < columns; j += kLanes) {
                const Vec v = load(at(from, sizes, i, j));
                float* row = to + static_cast<std::int64_t>(i) * row_stride + j;
                if (Engine::kTiles && columns - j >= kLanes) {
                    stream(row, v);
                } else if (columns - j >= kLanes) {
                    store(row, v);
                } else {
                    store_part(row, v, columns - j);
                }
            }
        }
    }

    /// Right operand of the transposed values: depth V, columns K.
    __attribute__((noinline)) static void pack_transposed(ChunkSizes sizes,
                                                          const float* values,
                                                          std::uint32_t* to) {
        const int panel = transposed_panel(sizes);
        transpose_units(
            sizes.keys, sizes.values / Engine::kPerUnit,
            [&](int k, int unit) {
                return element_units<Engine>(at(values, sizes, k, unit * Engine::kPerUnit));
            },
            [&](int unit, int k, VecUint v) {
                store_units(to + (k / kPanel) * panel + unit * kPanel + k % kPanel, v);
            });
    }
    [[nodiscard]] static int transposed_panel(const ChunkSizes& sizes) {
        return sizes.values / Engine::kPerUnit * kPanel;
    }
    [[nodiscard]] static std::int64_t size(const ChunkSizes& sizes) {
        return static_cast<std::int64_t>(sizes.keys) * sizes.values;
    }
    [[nodiscard]] static std::int64_t transposed_units(const ChunkSizes& sizes) {
        return static_cast<std::int64_t>(sizes.keys) * sizes.values / Engine::kPerUnit;
    }
};

}  // namespace hybridcp::HCP_ISA
