#pragma once

// The warp of the gradients kernel that makes what the gates say and, once the chunk's sums are
// there, dg.

#include "kernels/gdn/cuda/gradients_fragments.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients {

/// The lane's norms of one key head; 0 for tokens beyond the chunk.
HCP_DEVICE device::Float2 load_norms(const GradientsParams& p,
                                     const Item& item,
                                     const float* norms) {
    const auto row = static_cast<int32_t>(2 * device::lane_index());
    const int64_t at = int64_t{item.key_head} * p.shape.tokens + item.span.token + row;
    const auto load = [&](int32_t i) {
        return row + i >= item.span.tokens ? 0.0F
               : p.shape.use_qk_l2norm     ? device::load_global(norms + at + i)
                                           : 1.0F;
    };
    return {load(0), load(1)};
}

/// Loaded here, not ahead: this warp has time, but no registers.
HCP_DEVICE void store_powers(const GradientsParams& p, uint32_t to, int32_t head) {
    const int of_gradients = exponent_of_gradients(p.largest_gradients + head, p.shape);
    const int both = of_gradients + exponent_of_values(p.largest + head);
    device::store_shared(to + kPower, power_of_two_within(both));
    device::store_shared(to + kGradientPower, power_of_two_within(of_gradients));
    device::store_shared(to + kGradientDown, bf16_pair(power_of_two_within(-of_gradients)));
}

/// Returns which of the lane's gates were at the floor: bit 0 and bit 1.
HCP_DEVICE uint32_t store_gates(const GradientsParams& p,
                                const Block& block,
                                const Item& item,
                                const Turn& turn) {
    const int32_t head = head_of(block, item.key_head, turn.member);
    const device::Float2 r_k = load_norms(p, item, p.r_k), r_q = load_norms(p, item, p.r_q);
    const ChunkGates gates = scan_gates(load_gates(p.gates, item.span, head));
    device::mbarrier_wait_sleeping(block.barrier(kGatesEmpty + turn.parity()),
                                   ((turn.index >> 1) & 1) ^ 1, kPollNs);
    const uint32_t to = block.slot(turn.index) + 8 * device::lane_index();
    const auto store = [to](Vector vector, float first, float second) {
        device::store_shared(to + vector * kVectorBytes, device::Float2{first, second});
    };
    const auto exp2 = [](float x) { return device::exp2_approximate(x); };
    store(kSum, gates.sum[0], gates.sum[1]);
    store(kBeta, gates.beta[0], gates.beta[1]);
    store(kGamma, exp2(gates.sum[0]), exp2(gates.sum[1]));
    store(kToEnd, exp2(gates.all - gates.sum[0]), exp2(gates.all - gates.sum[1]));
    store(kKeyNorm, r_k.x, r_k.y);
    store(kQueryNorm, r_q.x, r_q.y);
    if (device::lane_index() == 0) {
        device::store_shared(block.slot(turn.index) + kItem,
                             device::Word4{static_cast<uint32_t>(item.span.token),
                                           static_cast<uint32_t>(item.span.tokens),
                                           static_cast<uint32_t>(item.key_head), 0});
        device::store_shared(block.slot(turn.index) + kDecay, exp2(gates.all));
        if constexpr (kFp16) {
            const Item stored = served_item(block, turn);
            store_powers(p, block.slot(turn.index), head_of(block, stored.key_head, turn.member));
        }
    }
    arrive_warp(block, kGatesFull + turn.parity());
    return (gates.floored[0] ? 1U : 0U) + (gates.floored[1] ? 2U : 0U);
}

/// dg_t = sum_{i >= t} (i + e + row sum - column sum of N) + sum_{i < t} z + e^B <dH', H>. The z
/// before t are added up: taking those after it from the total would cancel where all else is 0.
HCP_DEVICE void store_decay_gradient(const GradientsParams& p,
                                     const Block& block,
                                     const Turn& turn,
                                     uint32_t floored) {
    const uint32_t lane = device::lane_index();
    device::mbarrier_wait_sleeping(block.barrier(kSumsFull), turn.parity(), kPollNs);
    const device::Float2 reads = pair_at(block.shared + kThroughReads, 2 * lane);
    const device::Float2 erasures = pair_at(block.shared + kThroughErasures, 2 * lane);
    const device::Float2 pairs = pair_at(block.shared + kThroughPairs, 2 * lane);
    const device::Float2 writes = pair_at(block.shared + kThroughWrites, 2 * lane);
    device::Float2 columns = {0.0F, 0.0F};
    for (uint32_t i = 0; i < 8; ++i) {
        const device::Float2 part =
            pair_at(block.shared + kColumnSums + i * kVectorBytes, 2 * lane);
        columns = {columns.x + part.x, columns.y + part.y};
    }
    float through_state = 0.0F;
    for (uint32_t warp = 0; warp < 4; ++warp) {
        through_state += device::load_shared<float>(block.shared + kThroughState + 4 * warp);
    }
    const float second = reads.y + erasures.y + pairs.y - columns.y;
    const float first = reads.x + erasures.x + pairs.x - columns.x;
    float from_here = first + second, before = writes.x + writes.y;
    for (uint32_t distance = 1; distance < 32; distance <<= 1) {
        const float later = device::shuffle_down(from_here, distance);
        const float earlier = device::shuffle_up(before, distance);
        from_here += lane + distance < 32 ? later : 0.0F;
        before += lane >= distance ? earlier : 0.0F;
    }
    const float up_to_last = device::shuffle_up(before, 1);
    arrive_warp(block, kSumsEmpty);
    const auto decay = device::load_shared<float>(block.slot(turn.index) + kDecay);
    before = (lane > 0 ? up_to_last : 0.0F) + decay * through_state;
    const float after = device::shuffle_down(from_here, 1);
    const float gradient[2] = {from_here + before,
                               (lane < 31 ? after : 0.0F) + second + before + writes.x};
    const Item item = served_item(block, turn);
    const int32_t head = head_of(block, item.key_head, turn.member);
    for (int i = 0; i < 2; ++i) {
        const int32_t row = static_cast<int32_t>(2 * lane) + i;
        if (row < item.span.tokens) {
            const int64_t token = int64_t{item.span.token} + row;
            device::store_global(p.dg + token * p.dg_token_stride + head * p.dg_head_stride,
                                 (floored >> i & 1) != 0 ? 0.0F : gradient[i]);
        }
    }
}

/// In the place of a turn: there are no more items.
HCP_DEVICE void store_end(const Block& block, const Turn& turn) {
    device::mbarrier_wait_sleeping(block.barrier(kGatesEmpty + turn.parity()),
                                   ((turn.index >> 1) & 1) ^ 1, kPollNs);
    device::sync_warp();  // all lanes have read what was there
    if (device::lane_index() == 0) {
        device::store_shared(block.slot(turn.index) + kItem, device::Word4{0, 0, 0, 0});
    }
    arrive_warp(block, kGatesFull + turn.parity());
}

/// The gates run one turn ahead.
HCP_DEVICE void serve_gates(const GradientsParams& p, const Block& block) {
    Item item = {};
    uint32_t floored = 0;
    Turn turn = turn_of(block, 0, 0);
#pragma unroll 1
    do {
        const uint32_t last_floored = floored;
        if (turn.member == 0) {
            item = wait_item(p, block, turn.item);
        }
        if (item.span.tokens > 0) {
            floored = store_gates(p, block, item, turn);
        } else {
            store_end(block, turn);
        }
        if (turn.index > 0) {
            const uint32_t last_member = (turn.member > 0 ? turn.member : block.group) - 1;
            store_decay_gradient(p, block, {0, last_member, turn.index - 1}, last_floored);
        }
        ++turn.index;
        if (++turn.member == block.group) {
            turn.member = 0;
            ++turn.item;
        }
    } while (item.span.tokens > 0);
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients
