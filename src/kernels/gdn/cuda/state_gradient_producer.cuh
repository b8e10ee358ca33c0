#pragma once

// The third warpgroup of the backward walk: one warp each for rows, gates, dO, and what leaves.

#include "kernels/gdn/cuda/state_gradient_layout.cuh"

namespace hybridcp::gdn::cuda {

/// A tile of 64 tokens x 64 columns from column `column` of a head.
HCP_DEVICE void load_panel(uint32_t to,
                           const device::TensorMap& map,
                           uint32_t barrier,
                           int32_t column,
                           int32_t head,
                           int32_t token) {
    device::tensor_load(to, &map, barrier, {column, head, token});
}

/// K, Q and T of each chunk.
HCP_DEVICE void bring_rows(const StateGradientParams& p,
                           const StateGradientShared& shared,
                           const StateGradientItem& item) {
    const bool leads = device::lane_index() == 0;
    uint32_t landings = 0;
    for (int32_t use = 0; use < item.uses(); ++use) {
        const Chunk chunk = item.chunk_at(use);
        const bool is_short = chunk.tokens < kChunkTokens;
        const uint32_t tile = shared.keys(use);
        if (leads) {
            shared.rows.wait_empty_sleeping(use);
            const uint32_t barrier = is_short ? shared.row_landing : shared.rows.full(use);
            device::mbarrier_arrive_expect(barrier, StateGradientLayout::kRowStageBytes);
            for (int32_t panel = 0; panel < 4; ++panel) {
                load_panel(tile + kPanelBytes * static_cast<uint32_t>(panel), panel < 2 ? p.k : p.q,
                           barrier, 64 * (panel & 1), item.key_head, chunk.token);
            }
            shared.inverses.wait_empty_sleeping(use);
            device::mbarrier_arrive_expect(shared.inverses.full(use), kInverseBytes);
            const int64_t at = int64_t{item.head} * p.shape.num_chunks + item.index_at(use);
            device::bulk_load(shared.inverse(use), p.inverses + at * kInverseBytes, kInverseBytes,
                              shared.inverses.full(use));
        }
        device::sync_warp();
        if (is_short) {
            device::mbarrier_wait(shared.row_landing, landings++ & 1);
            for (uint32_t panel = 0; panel < 4; ++panel) {
                clear_rows(tile + kPanelBytes * panel, chunk.tokens);
            }
            device::fence_proxy_async();
            device::sync_warp();
            if (leads) {
                shared.rows.arrive_full(use);
            }
        }
    }
}

HCP_DEVICE void bring_output_gradients(const StateGradientParams& p,
                                       const StateGradientShared& shared,
                                       const StateGradientItem& item) {
    const bool leads = device::lane_index() == 0;
    uint32_t landings = 0;
    for (int32_t use = 0; use < item.uses(); ++use) {
        const Chunk chunk = item.chunk_at(use);
        const bool is_short = chunk.tokens < kChunkTokens;
        if (leads) {
            shared.gradients.wait_empty_sleeping(use);
            const uint32_t barrier =
                is_short ? shared.gradient_landing : shared.gradients.full(use);
            device::mbarrier_arrive_expect(barrier, kPanelBytes);
            load_panel(shared.gradient(use), p.d_o, barrier, 64 * static_cast<int32_t>(item.half),
                       item.head, chunk.token);
        }
        device::sync_warp();
        if (is_short) {
            device::mbarrier_wait(shared.gradient_landing, landings++ & 1);
            clear_rows(shared.gradient(use), chunk.tokens);
            device::fence_proxy_async();
            device::sync_warp();
            if (leads) {
                shared.gradients.arrive_full(use);
            }
        }
    }
}

/// The factors that the products need, for this lane's two tokens.
HCP_DEVICE void write_factors(const StateGradientShared& shared,
                              int32_t use,
                              const ChunkGates& gates,
                              const float (&q_norm)[2],
                              const float (&k_norm)[2]) {
    using Layout = StateGradientLayout;
    const uint32_t lane = device::lane_index();
    const auto put = [&](uint32_t array, float first, float second) {
        device::store_shared(shared.gate(use, array) + 8 * lane, device::Float2{first, second});
    };
    const float a = gates.sum[0], b = gates.sum[1];
    put(Layout::kSum, a, b);
    put(Layout::kQueryFactor, q_norm[0], q_norm[1]);
    put(Layout::kKeyFactor, k_norm[0], k_norm[1]);
    put(Layout::kReadFactor, device::exp2_approximate(gates.all - a) * k_norm[0],
        device::exp2_approximate(gates.all - b) * k_norm[1]);
    const float decay[2] = {device::exp2_approximate(a), device::exp2_approximate(b)};
    put(Layout::kOutputFactor, decay[0] * q_norm[0], decay[1] * q_norm[1]);
    put(Layout::kWriteFactor, -gates.beta[0] * decay[0] * k_norm[0],
        -gates.beta[1] * decay[1] * k_norm[1]);
    // Decays between blocks of 16 rows, through the first row of the later block.
    const float own = device::shuffle(a, lane & 24U);
    put(Layout::kRowFactor, device::exp2_approximate(a - own) * q_norm[0],
        device::exp2_approximate(b - own) * q_norm[1]);
    for (uint32_t block = 1; block < 4; ++block) {
        const float first = device::shuffle(a, 8 * block);
        const bool earlier = lane < 8 * block;
        put(Layout::kColumnFactors + block - 1,
            earlier ? device::exp2_approximate(first - a) * k_norm[0] : 0.0F,
            earlier ? device::exp2_approximate(first - b) * k_norm[1] : 0.0F);
    }
    if (lane == 0) {
        device::store_shared(shared.gate(use, 0) + Layout::kChunkDecay,
                             device::exp2_approximate(gates.all));
    }
}

struct RawFactors {
    RawGates gates;
    float q_norm[2], k_norm[2];
};
HCP_DEVICE RawFactors load_factors(const StateGradientParams& p,
                                   const StateGradientItem& item,
                                   int32_t use) {
    const Chunk chunk = item.chunk_at(use < item.uses() ? use : item.uses() - 1);
    RawFactors raw = {load_gates(p.gates, chunk, item.head), {0.0F, 0.0F}, {0.0F, 0.0F}};
    for (int i = 0; i < 2; ++i) {
        const auto row = static_cast<int32_t>(2 * device::lane_index()) + i;
        if (row < chunk.tokens) {
            const int64_t at = int64_t{item.key_head} * p.shape.tokens + chunk.token + row;
            raw.q_norm[i] = device::load_global(p.q_norms + at);
            raw.k_norm[i] = device::load_global(p.k_norms + at);
        }
    }
    return raw;
}

HCP_DEVICE void bring_gates(const StateGradientParams& p,
                            const StateGradientShared& shared,
                            const StateGradientItem& item) {
    // Two chunks ahead: a load from memory takes longer than a chunk.
    RawFactors ahead[2] = {load_factors(p, item, 0), load_factors(p, item, 1)};
    for (int32_t use = 0; use < item.uses(); ++use) {
        const RawFactors raw = ahead[0];
        ahead[0] = ahead[1];
        ahead[1] = load_factors(p, item, use + 2);
        const ChunkGates gates = scan_gates(raw.gates);
        shared.gates.wait_empty_sleeping(use);
        const float q_norm[2] = {p.shape.scale * raw.q_norm[0], p.shape.scale * raw.q_norm[1]};
        write_factors(shared, use, gates, q_norm, raw.k_norm);
        device::sync_warp();
        if (device::lane_index() == 0) {
            shared.gates.arrive_full(use);
        }
    }
}

/// One thread: dH' and Z to global memory.
HCP_DEVICE void store_results(const StateGradientParams& p,
                              const StateGradientShared& shared,
                              const StateGradientItem& item) {
    int32_t kept = 0;
    for (int32_t use = 0; use < item.uses(); ++use) {
        const bool is_kept = item.is_kept(use);
        const int64_t at = int64_t{item.head} * p.shape.num_chunks + item.index_at(use);
        if (is_kept) {
            shared.state_copy.wait_full_sleeping(kept);
            device::bulk_store(p.d_states + at * kStateBytes + item.half * 2 * kPanelBytes,
                               shared.state(), 2 * kPanelBytes);
            device::bulk_commit();
            device::bulk_wait_read<0>();
            shared.state_copy.arrive_empty(kept++);
        }
        shared.new_values.wait_full_sleeping(use);
        if (is_kept) {
            device::bulk_store(p.d_new_values + at * kRowsBytes + item.half * kPanelBytes,
                               shared.gradient(use), kPanelBytes);
            device::bulk_commit();
            device::bulk_wait_read<0>();
        }
        shared.gradients.arrive_empty(use);
    }
    device::bulk_wait<0>();
}

}  // namespace hybridcp::gdn::cuda
