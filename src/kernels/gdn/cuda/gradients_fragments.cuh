#pragma once

// Register fragments of the gradients kernel. Sums of 64 x 128 or 64 x 64: sums[4 j + e] is row 16
// warp + lane / 4 + 8 (e / 2), column 8 j + 2 (lane % 4) + e % 2.

#include "kernels/gdn/cuda/gradients_block.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients {

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
/// The lane's part of 16 Steps columns of a tile from `column` on, placed as the sums are.
template <int Steps>
HCP_DEVICE void load_rows(uint32_t (&rows)[Steps][4],
                          uint32_t tile,
                          uint32_t column,
                          const Place& at) {
#pragma unroll
    for (uint32_t step = 0; step < Steps; ++step) {
        device::load_matrix(rows[step], block_address(tile, 16 * at.warp, column + 16 * step));
    }
}
/// Adds dot products of the lane's two rows, in bf16 or fp16, with the sums from First on, the
/// lane's part of them.
template <int First, bool kF16 = false, int Count, int Steps>
HCP_DEVICE void add_dots(device::Float2& dot,
                         const float (&sums)[Count],
                         const uint32_t (&rows)[Steps][4]) {
#pragma unroll
    for (int i = 0; i < 4 * Steps; ++i) {
        const uint32_t bits = rows[i / 4][i % 4];
        const device::Float2 pair = kF16 ? device::unpack_f16(bits) : device::unpack_bf16(bits);
        float& total = i % 2 == 0 ? dot.x : dot.y;
        total += sums[First + 2 * i] * pair.x;
        total += sums[First + 2 * i + 1] * pair.y;
    }
}
/// For all four lanes of a row.
HCP_DEVICE device::Float2 sum_rows(device::Float2 of_lane) {
    return {sum_pairs_of_row(of_lane.x), sum_pairs_of_row(of_lane.y)};
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

/// Halves the columns that a lane has, and with them the rows that are still apart.
template <uint32_t Half, uint32_t Distance>
HCP_DEVICE void fold_columns(float* columns) {
    const bool upper = (device::lane_index() & Distance) != 0;
#pragma unroll
    for (uint32_t i = 0; i < Half; ++i) {
        const float given = upper ? columns[i] : columns[i + Half];
        const float kept = upper ? columns[i + Half] : columns[i];
        columns[i] = kept + device::shuffle_xor(given, Distance);
    }
}
/// Sums over the rows of a warp. columns[2 s + e]: column 16 s + 8 (lane / 16) + pair + e, of which
/// the rows of lane ^ 16 are added already. `to`: 64 floats.
HCP_DEVICE void store_column_sums(float (&columns)[8], uint32_t to, const Place& at) {
    fold_columns<4, 8>(columns);
    fold_columns<2, 4>(columns);
    const uint32_t lane = device::lane_index();
    const uint32_t column = lane / 8 % 2 * 32 + lane / 4 % 2 * 16 + lane / 16 * 8 + at.pair;
    device::store_shared(to + 4 * column, device::Float2{columns[0], columns[1]});
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients
