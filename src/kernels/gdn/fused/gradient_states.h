// H and dH' before their products, which both lie transposed: operands, and <H, dH'>.
#pragma once

#include "kernels/gdn/fused/backward_scratch.h"
#include "kernels/simd/doubles.h"

namespace hybridcp::HCP_ISA {

/// Where operands are pairs: H^T, dH' and <H, dH'> in one pass, which sums as state_product does.
template <typename Engine>
HCP_STAGE double pack_state_pair(ChunkSizes sizes,
                                 const float* state,
                                 const float* gradient,
                                 std::uint32_t* state_operand,
                                 std::uint32_t* gradient_operand) {
    static_assert(Engine::kPerUnit == 2 && kPanel == 2 * kLanes);
    const std::int64_t rows = sizes.values;
    const int gradient_panel = State<Engine>::transposed_panel(sizes.transposed());
    VecDouble total = {};
    Vec sums[4] = {};
    for (int k = 0; k < sizes.keys; k += kPanel) {
        for (int v = 0; v < sizes.values; v += kLanes) {
            const std::int64_t block = k * rows + std::int64_t{v} * kPanel;
            VecUint units[kLanes];  // of a row of dH'^T: pairs along k
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; i += 2) {
                const float *h = state + block + i * kPanel, *g = gradient + block + i * kPanel;
                std::uint32_t* to = state_operand + (block + i * kPanel) / 2;
                const Vec row[2] = {load(g), load(g + kLanes)};
                const Vec next[2] = {load(g + kPanel), load(g + kPanel + kLanes)};
#pragma GCC unroll 2
                for (int n = 0; n < 2; ++n) {
                    const Vec first = load(h + n * kLanes);
                    const Vec second = load(h + n * kLanes + kPanel);
                    sums[2 * n] += first * row[n];
                    sums[2 * n + 1] += second * next[n];
                    store_units(to + n * kLanes, pair_units(first, second));
                }
                units[i] = narrowed_row(row[0], row[1]);
                units[i + 1] = narrowed_row(next[0], next[1]);
            }
            transpose_lanes(units);
            std::uint32_t* to = gradient_operand + v / kPanel * gradient_panel + k / 2 * kPanel;
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                store_units(to + i * kPanel + v % kPanel, units[i]);
            }
            if (v % kPanel != 0) {
                total += widened((sums[0] + sums[1]) + (sums[2] + sums[3]));
                for (Vec& sum : sums) {
                    sum = Vec{};
                }
            }
        }
    }
    return sum_lanes(total);
}

/// What the products of a chunk read of H and dH' and is not there yet. Returns <H, dH'>.
template <typename Engine>
HCP_INLINE double pack_states(const ChunkSizes& sizes,
                              const ChunkRecord<Engine>& record,
                              const State<Engine>& gradient,
                              bool reads_gradient,
                              BackwardScratch<Engine>& scratch) {
    const bool packs_gradient = reads_gradient && !gradient.zero;
    if constexpr (Engine::kPerUnit == 2) {
        if (packs_gradient && !record.zero_state) {
            return pack_state_pair<Engine>(sizes, record.state, gradient.values,
                                           scratch.state_operand, scratch.gradient_operand);
        }
    }
    if (packs_gradient) {
        State<Engine>::pack_transposed(sizes.transposed(), gradient.values,
                                       scratch.gradient_operand);
    }
    if (record.zero_state || (Engine::kPerUnit == 1 && gradient.zero)) {
        return 0;
    }
    const double product =
        state_product<Engine>(sizes, record.state, gradient.values, scratch.state_operand);
    return gradient.zero ? 0 : product;
}

}  // namespace hybridcp::HCP_ISA
