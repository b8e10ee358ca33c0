#pragma once

// Register fragments of the gradients kernel. Sums of 64 x 128 or 64 x 64: sums[4 j + e] is row 16
// warp + lane / 4 + 8 (e / 2), column 8 j + 2 (lane % 4) + e % 2.

#include "kernels/gdn/cuda/gradients_block.cuh"

namespace hybridcp::gdn::cuda::gradients {

/// A lane's place in the sums of its warpgroup.
struct Place {
    uint32_t warp;  // of the warpgroup
    uint32_t row;   // the first; the second is 8 below
    uint32_t pair;  // 2 (lane % 4)
};
HCP_DEVICE Place place() {
    const uint32_t lane = device::lane_index();
    // So that the compiler sees it uniform.
    const uint32_t warp = device::shuffle(device::warp_index() % 4, 0);
    return {warp, 16 * warp + lane / 4, lane % 4 * 2};
}

/// Two neighbouring values of a vector over tokens, or the two of this lane's rows.
HCP_DEVICE device::Float2 pair_at(uint32_t vector, uint32_t token) {
    return device::load_shared<device::Float2>(vector + 4 * token);
}
HCP_DEVICE device::Float2 rows_at(uint32_t vector, const Place& at) {
    return {device::load_shared<float>(vector + 4 * at.row),
            device::load_shared<float>(vector + 4 * at.row + 32)};
}

HCP_DEVICE uint32_t element(uint32_t tile, uint32_t row, uint32_t column) {
    return tile + column / 64 * kPanelBytes + device::swizzle_128(row * 128 + column % 64 * 2);
}
/// What this lane gives to load_matrix and store_matrix for the 16 x 16 block at (row, column).
HCP_DEVICE uint32_t block_address(uint32_t tile, uint32_t row, uint32_t column) {
    const uint32_t lane = device::lane_index();
    return element(tile, row + lane % 16, column + lane / 16 * 8);
}
/// The same for the block's transpose.
HCP_DEVICE uint32_t transposed_address(uint32_t tile, uint32_t row, uint32_t column) {
    const uint32_t lane = device::lane_index();
    return element(tile, row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8);
}

HCP_DEVICE float sum_pairs_of_row(float value) {
    value += device::shuffle_xor(value, 1);
    return value + device::shuffle_xor(value, 2);
}
/// Dot products of this lane's two rows with those of a tile of bf16 from `column` on, by lane.
template <int Count>
HCP_DEVICE void add_dots(device::Float2& dot,
                         const float (&sums)[Count],
                         uint32_t tile,
                         uint32_t column,
                         const Place& at) {
#pragma unroll
    for (uint32_t step = 0; step < Count / 8; ++step) {
        uint32_t x[4];
        device::load_matrix(x, block_address(tile, 16 * at.warp, column + 16 * step));
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const device::Float2 pair = device::unpack_bf16(x[i]);
            const float* sum = sums + 8 * step + 2 * i;
            float& total = i % 2 == 0 ? dot.x : dot.y;
            total += sum[0] * pair.x;
            total += sum[1] * pair.y;
        }
    }
}
/// The same of whole rows, for all four lanes of a row.
HCP_DEVICE device::Float2 dot_rows(const float (&sums)[64], uint32_t tile, const Place& at) {
    device::Float2 dot = {0.0F, 0.0F};
    add_dots(dot, sums, tile, 0, at);
    return {sum_pairs_of_row(dot.x), sum_pairs_of_row(dot.y)};
}
/// to[First ..] += factor * part, by row.
template <int First, int Count>
HCP_DEVICE void add_scaled(float (&to)[64], const float (&part)[Count], device::Float2 factor) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        to[First + i] += (i % 4 < 2 ? factor.x : factor.y) * part[i];
    }
}
HCP_DEVICE void store_rows(uint32_t vector, const Place& at, device::Float2 value) {
    if (at.pair == 0) {
        device::store_shared(vector + 4 * at.row, value.x);
        device::store_shared(vector + 4 * at.row + 32, value.y);
    }
}

}  // namespace hybridcp::gdn::cuda::gradients
