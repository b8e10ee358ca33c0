// Products with states: the update, and <H, dH>.
#pragma once

#include "kernels/gdn/fused/state.h"
#include "kernels/simd/doubles.h"

namespace hybridcp::HCP_ISA {

/// H <- decay H + a product [K, V] whose depth is `depth` elements. The old values are read at
/// `old`, which may be the state's own.
template <bool WithOperand = true, typename Engine>
HCP_STAGE void update_state(ChunkSizes sizes,
                            const float* old,
                            State<Engine>& state,
                            float decay,
                            const Product& product,
                            int depth) {
    const int units = depth / Engine::kPerUnit;
    State<Engine> target = state;
    Engine::multiply(
        product, [&](int) { return DepthRange{0, units}; },
        [&](ResultIndex i, ResultIndex j, Vec first, Vec second) {
            const float* from = State<Engine>::at(old, sizes, i.wide, j.wide);
            target.template set<WithOperand>(sizes, i.wide, j.wide, decay * load(from) + first,
                                             decay * load(from + kPanel) + second);
        });
    state.zero = false;
}

/// <H, dH'>: short fp32 sums, added up in fp64, since the whole is often far smaller than its
/// terms. fp32 whatever the operands: in bf16 it would be the largest error of dg. Where operands
/// are pairs, H goes into `operand` on the way.
template <typename Engine>
HCP_STAGE double state_product(ChunkSizes sizes,
                               const float* state,
                               const float* gradient,
                               std::uint32_t* operand) {
    constexpr std::int64_t short_sum = 1024;  // sizes are multiples of a panel squared
    VecDouble total = {};
    const std::int64_t size = State<Engine>::size(sizes);
    for (std::int64_t begin = 0; begin < size; begin += short_sum) {
        Vec sums[4] = {};
        for (std::int64_t i = begin; i < begin + short_sum; i += 2 * kPanel) {
#pragma GCC unroll 8
            for (int n = 0; n < kPanel / kLanes; ++n) {
                const std::int64_t at = i + n * kLanes;
                const Vec first = load(state + at), second = load(state + at + kPanel);
                sums[2 * n % 4] += first * load(gradient + at);
                sums[2 * n % 4 + 1] += second * load(gradient + at + kPanel);
                if constexpr (Engine::kPerUnit == 2) {
                    store_units(operand + i / 2 + n * kLanes, pair_units(first, second));
                }
            }
        }
        total += widened((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    return sum_lanes(total);
}

}  // namespace hybridcp::HCP_ISA
