// Rows of q and k: normalised, and laid out for products, in one pass over registers.
#pragma once

#include "kernels/gdn/fused/token_rows.h"

namespace hybridcp::HCP_ISA {

/// What a chunk's products and norms are, whoever makes them: forward may keep them for backward.
struct KeyRecord {
    float *kk, *qk;                // [C, C] k k^T, scale * q k^T
    float *q_inverse, *k_inverse;  // [C] 1 / |q|, 1 / |k|; 1 without normalisation

    static constexpr std::int64_t floats(std::int64_t tokens) { return 2 * tokens * (tokens + 1); }
    static KeyRecord at(float* from, int tokens) {
        float* inverse = from + 2 * tokens * tokens;
        return {.kk = from,
                .qk = from + tokens * tokens,
                .q_inverse = inverse,
                .k_inverse = inverse + tokens};
    }
};

/// The lane sums of kLanes vectors, which are used up.
HCP_INLINE Vec sums_of_lanes(Vec* v) {
    VecUint columns[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
        columns[i] = std::bit_cast<VecUint>(v[i]);
    }
    transpose_lanes(columns);
    Vec sums[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
        sums[i] = std::bit_cast<Vec>(columns[i]);
    }
#pragma GCC unroll 4
    for (int width = kLanes / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < width; ++i) {
            sums[i] += sums[i + width];
        }
    }
    return sums[0];
}

/// 1 / |x| of each row, of which there are a multiple of kLanes, or 1.
template <typename Input>
HCP_STAGE void inverse_norms(
    TokenRows<Input> from, int rows, int columns, bool normalised, float* inverse) {
    for (int r = 0; r < rows; r += kLanes) {
        if (!normalised) {
            store(inverse + r, broadcast(1.0F));
            continue;
        }
        Vec sums[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            Vec even = {}, odd = {};
            for (int c = 0; c < columns; c += 2 * kLanes) {
                Vec x[2];
                from.load_pair(r + i, c, x);
                even += x[0] * x[0];
                odd += x[1] * x[1];
            }
            sums[i] = even + odd;
        }
        store(inverse + r, 1.0F / square_root(sums_of_lanes(sums) + 1e-6F));
    }
}

/// Where normalised rows go.
template <typename Engine>
struct KeyRows {
    typename Engine::Element* elements;
    int element_stride;
    std::uint32_t* units;  // right operand whose depth is the rows, or null
    int panel_stride;
};

/// Rows scaled by `factors`.
template <typename Engine, typename Input>
HCP_STAGE void scale_rows(
    TokenRows<Input> from, const float* factors, int rows, int columns, KeyRows<Engine> to) {
    for (int r = 0; r < rows; r += 2) {
        const Vec first_factor = broadcast(factors[r]), second_factor = broadcast(factors[r + 1]);
        for (int c = 0; c < columns; c += 2 * kLanes) {
            Vec first[2], second[2];
            from.load_pair(r, c, first);
            from.load_pair(r + 1, c, second);
            for (int n = 0; n < 2; ++n) {
                first[n] *= first_factor;
                second[n] *= second_factor;
            }
            store_elements<Engine>(to.elements + r * to.element_stride + c, first);
            store_elements<Engine>(to.elements + (r + 1) * to.element_stride + c, second);
            if (to.units != nullptr) {
                store_row_pair<Engine>(unit_of_row<Engine>(to.units, to.panel_stride, r, c), first,
                                       second);
            }
        }
    }
}

}  // namespace hybridcp::HCP_ISA
