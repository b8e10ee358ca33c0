#pragma once

// Products of the gradients kernel with states: their terms of dq^ and dk^, and <dH', H>.

#include "kernels/gdn/cuda/gradients_products.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients {

/// The warp's part of <dH', H>: the diagonal of H^T-rows times dH'^T-rows.
HCP_DEVICE float multiply_states(const Block& block, const Place& at) {
    float pairs[32];
    device::wgmma_fence();
#pragma unroll
    for (uint32_t step = 0; step < 16; ++step) {
        multiply_shared<device::Major::kK, device::Major::kK>(
            pairs, columns_descriptor(block.tile(kState), step),
            columns_descriptor(block.tile(kStateGradient), step), step > 0);
    }
    device::wgmma_commit();
    finish(pairs);
    float sum = 0.0F;
#pragma unroll
    for (uint32_t step = 0; step < 4; ++step) {
        if (step == at.warp) {
            for (uint32_t i = 8 * step; i < 8 * step + 8; ++i) {
                const uint32_t column = i / 4 * 8 + at.pair + i % 2;
                sum += column == at.row + i / 2 % 2 * 8 ? pairs[i] : 0.0F;
            }
        }
    }
    for (uint32_t distance = 16; distance > 0; distance >>= 1) {
        sum += device::shuffle_xor(sum, distance);
    }
    return sum;
}

/// factor A B: A is D, dR or dO, B is dH'^T or H^T.
struct Term {
    uint32_t a, a_full;  // a tile, and the address of a barrier
    Tile b;
    device::Float2 factor;
};
HCP_DEVICE Term term_of(
    const Block& block, const Turn& turn, Role role, bool of_writes, float scale, const Place& at) {
    const uint32_t slot = block.slot(turn.index);
    const float power = power_at(block, turn, kPower);
    device::Float2 decay = rows_at(slot + (of_writes ? kToEnd : kGamma) * kVectorBytes, at);
    decay = {power * decay.x, power * decay.y};
    if (of_writes) {
        return {block.shared + kSolved, block.barrier(kSolvedReady), kStateGradient, decay};
    }
    if (role == kQueriesRole) {
        return {block.tile(kOutputGradients),
                block.full(kOutputGradients),
                kState,
                {scale * decay.x, scale * decay.y}};
    }
    const device::Float2 beta = rows_at(slot + kBeta * kVectorBytes, at);
    return {block.shared + kAdjoint,
            block.barrier(kAdjointReady),
            kState,
            {-beta.x * decay.x, -beta.y * decay.y}};
}

/// Half of the columns, which starts at a panel; adds the lane's products with `rows` if given.
template <int Half>
HCP_DEVICE void add_half(const Block& block,
                         const Term& term,
                         bool has_rows,
                         uint32_t rows_tile,
                         const Place& at,
                         float (&sums)[64],
                         device::Float2& dot) {
    float part[32];
    multiply_state(part, term.a, block.tile(term.b) + Half * kPanelBytes);
    finish(part);
    if (Half == 1 && term.b == kState) {
        release(block, kState);
    }
    if (has_rows) {
        uint32_t rows[2][4];
        load_rows(rows, rows_tile, 64 * Half, at);
        add_dots<0>(dot, part, rows);
        load_rows(rows, rows_tile, 64 * Half + 32, at);
        add_dots<16>(dot, part, rows);
    }
    add_scaled<32 * Half>(sums, part, term.factor);
}
/// Returns the term's products with rows of K or Q, or 0 without them. H is released.
HCP_DEVICE device::Float2 add_term(const Block& block,
                                   const Turn& turn,
                                   const Term& term,
                                   bool has_rows,
                                   uint32_t rows_tile,
                                   const Place& at,
                                   float (&sums)[64]) {
    device::Float2 dot = {0.0F, 0.0F};
    device::mbarrier_wait(block.full(term.b), turn.parity());
    device::mbarrier_wait(term.a_full, turn.parity());
    add_half<0>(block, term, has_rows, rows_tile, at, sums, dot);
    add_half<1>(block, term, has_rows, rows_tile, at, sums, dot);
    dot = sum_rows(dot);
    return {term.factor.x * dot.x, term.factor.y * dot.y};
}

/// Products of rows of the sums with those of K or Q.
HCP_DEVICE device::Float2 multiply_by_rows(const float (&sums)[64],
                                           uint32_t rows_tile,
                                           const Place& at) {
    device::Float2 dot = {0.0F, 0.0F};
    uint32_t rows[4][4];
    load_rows(rows, rows_tile, 0, at);
    add_dots<0>(dot, sums, rows);
    load_rows(rows, rows_tile, 64, at);
    add_dots<32>(dot, sums, rows);
    return sum_rows(dot);
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients
