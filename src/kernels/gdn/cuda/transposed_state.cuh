#pragma once

// What a state warpgroup does with its half of a transposed state: 64 rows of V, 128 columns of K,
// fp32 sums of a 64 x 128 product in registers (wgmma.cuh), and the same as left operand.

#include "kernels/gdn/cuda/operands.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

constexpr int kStateRows = 64;  // of V, one warpgroup

/// The lane's place in a warpgroup's fragments.
struct LanePlace {
    uint32_t warp, row, pair;     // warp of the warpgroup; lane / 4; lane % 4
    uint32_t matrix, matrix_row;  // for ldmatrix and stmatrix: lane / 8, lane % 8
};
HCP_DEVICE LanePlace lane_place() {
    const uint32_t lane = device::lane_index();
    return {device::warp_index() & 3, lane >> 2, lane & 3, lane >> 3, lane & 7};
}

/// One state [K, V] of fp32 in global memory and the half of V that this warpgroup has.
HCP_DEVICE int64_t state_offset(const LanePlace& at, uint32_t half, int i) {
    const uint32_t column = 8 * (static_cast<uint32_t>(i) >> 2) + 2 * at.pair + (i & 1);
    const uint32_t row = kStateRows * half + 16 * at.warp + at.row + 8 * ((i >> 1) & 1);
    return int64_t{column} * kHeadDim + row;
}
HCP_DEVICE void load_state(float (&state)[64], const float* from, uint32_t half, float factor) {
    const LanePlace at = lane_place();
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        state[i] =
            from == nullptr ? 0.0F : factor * device::load_global(from + state_offset(at, half, i));
    }
}
HCP_DEVICE void store_state(const float (&state)[64], float* to, uint32_t half, float factor) {
    const LanePlace at = lane_place();
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        device::store_global(to + state_offset(at, half, i), factor * state[i]);
    }
}

/// As left operand of eight steps of 16 in K.
HCP_DEVICE void pack_state(uint32_t (&packed)[8][4], const float (&state)[64]) {
#pragma unroll
    for (int step = 0; step < 8; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            packed[step][i] = pack_operand(state[8 * step + 2 * i], state[8 * step + 2 * i + 1]);
        }
    }
}
/// To two panels (problem.cuh, kStateBytes).
HCP_DEVICE void store_packed_state(uint32_t panels, const uint32_t (&packed)[8][4]) {
    const LanePlace at = lane_place();
    const uint32_t row = 16 * at.warp + 8 * (at.matrix & 1) + at.matrix_row;
#pragma unroll
    for (uint32_t step = 0; step < 8; ++step) {
        const uint32_t piece = (2 * step + (at.matrix >> 1)) & 7;
        device::store_matrix(
            panels + kPanelBytes * (step >> 2) + device::swizzle_128(128 * row + 16 * piece),
            packed[step]);
    }
}

/// Where this lane finds, in a panel of tokens x V columns, rows for the transposed matrices of 16
/// tokens: step j of 16 tokens is 2,048 bytes on.
HCP_DEVICE uint32_t transposed_rows_offset(const LanePlace& at) {
    const uint32_t row = 8 * (at.matrix >> 1) + at.matrix_row;
    return device::swizzle_128(128 * row + 16 * (2 * at.warp + (at.matrix & 1)));
}
constexpr uint32_t kTokenStepBytes = 16 * 128;

/// columns (V x tokens) = state^T K^T, K: two panels of tokens x K.
HCP_DEVICE void multiply_by_keys(float (&columns)[32],
                                 const uint32_t (&packed)[8][4],
                                 uint32_t keys) {
    const uint64_t tile = device::matrix_descriptor(keys, 16, 1024);
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        multiply_registers<device::Major::kK>(
            columns, packed[step],
            device::advance(tile, kPanelBytes * (step >> 2) + 32 * (step & 3)), step > 0);
    }
}
/// state += left (V x tokens) rows, rows: two panels of tokens x K.
HCP_DEVICE void add_outer_products(float (&state)[64],
                                   const uint32_t (&left)[4][4],
                                   uint32_t rows) {
    const uint64_t tile = device::matrix_descriptor(rows, kPanelBytes, 1024);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        multiply_registers<device::Major::kMn>(state, left[step],
                                               device::advance(tile, kTokenStepBytes * step), true);
    }
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
