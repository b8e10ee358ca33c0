#pragma once

// What the three warpgroups of the gradients kernel that multiply do with an item. They take
// different ways through the same instructions, which only so fit the instruction cache:
//   values   D, dR, dV, dbeta and dN
//   keys     dk^ = dec (D dH'^T) - gamma (dE H^T) + dP^T q^ + (dN + dN^T) k^
//   queries  dP and dq^ = s gamma (dO H^T) + dP k^

#include "kernels/gdn/cuda/gradients_pairs.cuh"
#include "kernels/gdn/cuda/gradients_rows.cuh"
#include "kernels/gdn/cuda/gradients_solve.cuh"
#include "kernels/gdn/cuda/gradients_terms.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients {

/// What lasts from turn to turn: of dk^ or dq^, and dN or dP.
struct Sums {
    float rows[64], pairs[32];
};
/// How a warpgroup differs from the others where they run the same instructions.
struct Side {
    Role role;
    uint32_t rows;             // the tile of K or Q
    uint32_t norms, products;  // offsets in a slot; of k^ k^T or q^ k^T
    uint32_t columns;          // of the column sums of N
};
HCP_DEVICE Side side_of(const Block& block) {
    uint32_t which[1] = {device::warp_index() / 4};
    device::keep_registers(which);  // so that no role gets instructions of its own
    const uint32_t role = device::shuffle(which[0], 0);
    const bool reads = role == kQueriesRole;
    return {static_cast<Role>(role), reads ? block.tile(kQueries) : block.tile(kKeys),
            (reads ? kQueryNorm : kKeyNorm) * kVectorBytes,
            block.shared + (reads ? kReadProducts : kEraseProducts),
            block.shared + kColumnSums + (reads ? 4 * kVectorBytes : 0)};
}

/// dO becomes fp16 in its place. By the warpgroup of dq.
HCP_DEVICE void convert_output_gradients(const Block& block, const Turn& turn) {
    const uint32_t tile = block.tile(kOutputGradients) + 16 * (device::thread_index() % 128);
    const auto down = device::load_shared<uint32_t>(block.slot(turn.index) + kGradientDown);
    wait_full(block, turn, kOutputGradients);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
        const uint32_t at = tile + 2048 * i;
        device::store_shared(at, to_f16(device::load_shared<device::Word4>(at), down));
    }
    device::fence_proxy_async();
    device::barrier_sync(kConverted, 128);
}

/// k^ k^T or s q^ k^T for all turns of an item.
HCP_DEVICE void multiply_rows(
    const Block& block, const Turn& turn, const Side& side, float scale, const Place& at) {
    float pairs[32];
    wait_full(block, turn, kKeys);
    if (side.role == kQueriesRole) {
        wait_full(block, turn, kQueries);
    } else {
        scale = 1.0F;
    }
    multiply_pairs(pairs, side.rows, block.tile(kKeys));
    finish(pairs);
    if (side.role == kValuesRole) {
        release(block, kKeys);
    }
    const uint32_t slot = block.slot(turn.index);
    const device::Float2 norm = rows_at(slot + side.norms, at);
    store_products(pairs, {scale * norm.x, scale * norm.y}, slot + kKeyNorm * kVectorBytes,
                   side.products, at);
}

/// dN or dP of a turn, and what of it goes through gates and beta. `products`: <dR, E> or i.
HCP_DEVICE void pairs_of_turn(const GradientsParams& p,
                              const Block& block,
                              const Turn& turn,
                              const Side& side,
                              const Place& at,
                              device::Float2 products,
                              float (&total)[32]) {
    const bool reads = side.role == kQueriesRole;
    const uint32_t slot = block.slot(turn.index);
    const uint32_t gradients = reads ? block.tile(kOutputGradients) : block.shared + kAdjoint;
    const device::Float2 beta = rows_at(slot + kBeta * kVectorBytes, at);
    const float power = power_at(block, turn, kPower);
    const device::Float2 factor = {reads ? power : -power * beta.x,
                                   reads ? power : -power * beta.y};
    device::Float2 rows = {0.0F, 0.0F};
    float solved[16], columns[8] = {};
    wait_ready(block, turn, kSolvedReady);
    device::mbarrier_wait(reads ? block.full(kOutputGradients) : block.barrier(kAdjointReady),
                          turn.parity());
    multiply_half(solved, gradients, block.shared + kSolved);
    finish(solved);
    weigh_pairs<0>(solved, factor, slot, side.products, at, total, columns, rows);
    multiply_half(solved, gradients, block.shared + kSolved + kPanelBytes / 2);
    finish(solved);
    arrive_warp(block, reads ? uint32_t{kEmpty} + kOutputGradients : uint32_t{kAdjointEmpty});
    arrive_warp(block, kSolvedEmpty);
    weigh_pairs<1>(solved, factor, slot, side.products, at, total, columns, rows);
    rows = sum_rows(rows);
    wait_free(block, turn, kSumsEmpty);
    store_column_sums(columns, side.columns + at.warp * kVectorBytes, at);
    const device::Float2 more = {reads ? products.x : 0.0F, reads ? products.y : 0.0F};
    store_rows(block.shared + (reads ? kThroughReads : kThroughPairs), at,
               {more.x + factor.x * rows.x, more.y + factor.y * rows.y});
    if (!reads) {
        store_dbeta(p, block, turn, at, {products.x - power * rows.x, products.y - power * rows.y});
    }
}

/// The terms with states of a turn, of dk^ two: that with dH' first, which is loaded again first.
/// An item's first is all there is in the sums, so K or Q may come after it. Returns i of dq^.
HCP_DEVICE device::Float2 terms_of_turn(const GradientsParams& p,
                                        const Block& block,
                                        const Turn& turn,
                                        const Side& side,
                                        const Place& at,
                                        float (&sums)[64]) {
    const bool reads = side.role == kQueriesRole;
    bool has_rows = turn.member > 0;
    float through_state = 0.0F;
    device::Float2 writes = {0.0F, 0.0F}, products = {0.0F, 0.0F};
    if (kFp16 && reads) {
        convert_output_gradients(block, turn);
    }
#pragma unroll 1
    for (uint32_t i = reads ? 1 : 0; i < 2; ++i) {
        const Term term = term_of(block, turn, side.role, i == 0, p.shape.scale, at);
        writes = products;
        products = add_term(block, turn, term, has_rows, side.rows, at, sums);
        if (!reads) {
            arrive_warp(block, i == 0 ? kSolvedEmpty : kAdjointEmpty);
        }
        if (i == 0) {
            wait_full(block, turn, kState);
            through_state = power_at(block, turn, kPower) * multiply_states(block, at);
            release(block, kStateGradient);
        }
        if (!has_rows) {
            wait_full(block, turn, reads ? kQueries : kKeys);
            products = multiply_by_rows(sums, side.rows, at);
            has_rows = true;
        }
    }
    const device::Float2 norm = rows_at(block.slot(turn.index) + side.norms, at);
    products = {norm.x * products.x, norm.y * products.y};
    if (!reads) {
        wait_free(block, turn, kSumsEmpty);
        store_rows(block.shared + kThroughWrites, at, {norm.x * writes.x, norm.y * writes.y});
        store_rows(block.shared + kThroughErasures, at, products);
        if (device::lane_index() == 0) {
            device::store_shared(block.shared + kThroughState + 4 * at.warp, through_state);
        }
    }
    return products;
}

HCP_DEVICE void take_turn(const GradientsParams& p,
                          const Block& block,
                          const Turn& turn,
                          const Side& side,
                          const Place& at,
                          Sums& sums) {
    device::Float2 products;
    wait_gates(block, turn);
    if (side.role == kValuesRole) {
        products = leave_adjoint(block, turn, at);
#pragma unroll
        for (float& sum : sums.rows) {
            sum = 0.0F;  // unused, and no registers while D and dR are made
        }
    } else {
        products = terms_of_turn(p, block, turn, side, at, sums.rows);
    }
    if (side.role != kKeysRole) {
        if (turn.member == 0) {
            multiply_rows(block, turn, side, p.shape.scale, at);
        }
        pairs_of_turn(p, block, turn, side, at, products, sums.pairs);
    }
    arrive_warp(block, kSumsFull);
}

/// dP or dN, from which the products of an item's last step are made, to the others and to this
/// warpgroup's own rows. They are bf16, as K and Q: only dq and dk are
/// made of them.
HCP_DEVICE void add_pairs(const GradientsParams& p,
                          const Block& block,
                          const Turn& turn,
                          const Side& side,
                          const Place& at,
                          Sums& sums) {
    const uint32_t slot = block.slot(turn.index), parity = turn.item_parity();
    if (side.role == kValuesRole) {
        device::mbarrier_wait(block.barrier(kErasePairsEmpty), parity ^ 1);
        pack_erasures(sums.pairs, slot, block.shared + kErasePairs, at);
        publish_warp(block, kErasePairsReady);
    } else if (side.role == kQueriesRole) {
        uint32_t operand[4][4];
        device::mbarrier_wait(block.barrier(kReadPairsEmpty), parity ^ 1);
        pack_reads(sums.pairs, p.shape.scale, slot, block.shared + kReadPairs, at, operand);
        publish_warp(block, kReadPairsReady);
        multiply<false>(sums.rows, operand, block.tile(kKeys), true);
        finish(sums.rows);
    } else {
        wait_full(block, turn, kQueries);
        device::mbarrier_wait(block.barrier(kErasePairsReady), parity);
        multiply_square(sums.rows, block.shared + kErasePairs, block.tile(kKeys));
        device::mbarrier_wait(block.barrier(kReadPairsReady), parity);
        multiply_transposed(sums.rows, block.shared + kReadPairs, block.tile(kQueries));
        finish(sums.rows);
        arrive_warp(block, kErasePairsEmpty);
    }
}

/// dq or dk from the sums.
HCP_DEVICE void store_sums_of(const GradientsParams& p,
                              const Block& block,
                              const Turn& turn,
                              const Side& side,
                              const Place& at,
                              float (&sums)[64]) {
    const bool reads = side.role == kQueriesRole;
    uint32_t rows[8][4];
    device::Float2 dot = {0.0F, 0.0F};
    load_rows(rows, side.rows, 0, at);
    add_dots<0>(dot, sums, rows);
    device::fence_proxy_async();
    release(block, kKeys);
    release(block, kQueries);
    dot = sum_rows(dot);
    if (p.shape.use_qk_l2norm) {
        undo_normalisation(sums, rows, dot, rows_at(block.slot(turn.index) + side.norms, at));
    }
    // The rows leave through the space of the warp's q^ k^T, or of dP once all have multiplied it.
    uint32_t space = block.shared + kReadProducts + blocks_before(at.warp) * kBlockBytes;
    if (!reads) {
        device::barrier_sync(kPairsRead, 128);
        space = block.shared + kReadPairs + at.warp * kBlockBytes;
    }
    store_rows_of(p, block, turn, at, reads ? p.dq : p.dk, space, sums);
    if (!reads) {
        arrive_warp(block, kReadPairsEmpty);
    }
}

HCP_DEVICE void take_item(const GradientsParams& p, const Block& block, uint32_t item) {
    Sums sums = {};
#pragma unroll 1
    for (uint32_t member = 0; member < block.group; ++member) {
        const Turn turn = turn_of(block, item, member);
        take_turn(p, block, turn, side_of(block), place(), sums);
        if (member + 1 < block.group) {
            arrive_warp(block, kGatesEmpty + turn.parity());
        }
    }
    const Place at = place();
    const Side side = side_of(block);
    const Turn last = turn_of(block, item, block.group - 1);
    add_pairs(p, block, last, side, at, sums);
    if (side.role != kValuesRole) {
        store_sums_of(p, block, last, side, at, sums.rows);
    }
    arrive_warp(block, kGatesEmpty + last.parity());
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients
