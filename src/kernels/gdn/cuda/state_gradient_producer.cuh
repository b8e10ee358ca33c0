#pragma once

// The third warpgroup of the backward walk: a warp for rows, two for gates, one for what leaves.

#include <cmath>

#include "kernels/gdn/cuda/state_gradient_layout.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

/// Makes `load(barrier)` fill a tile and completes `full`. Of a tile with rows beyond the chunk,
/// which only the first of a walk can be, those are cleared first.
template <class Load>
HCP_DEVICE void bring_tile(
    uint32_t tile, uint32_t panels, int32_t rows, uint32_t full, uint32_t landing, Load load) {
    const bool leads = device::lane_index() == 0;
    const bool is_short = rows < kChunkTokens;
    const uint32_t barrier = is_short ? landing : full;
    if (leads) {
        device::mbarrier_arrive_expect(barrier, panels * kPanelBytes);
        load(barrier);
    }
    if (is_short) {
        device::mbarrier_wait(landing, 0);
        for (uint32_t panel = 0; panel < panels; ++panel) {
            clear_rows(tile + kPanelBytes * panel, rows);
        }
        device::fence_proxy_async();
        device::arrive_warp(full);
    } else {
        device::arrive_beside_copy(full);
    }
    device::sync_warp();
}

/// K, a panel from each block for both, and Q of this block's chunks.
HCP_DEVICE void bring_keys_and_queries(const StateGradientParams& p,
                                       const StateGradientShared& shared,
                                       const StateGradientItem& item,
                                       int32_t use) {
    constexpr uint16_t kBoth = 3;
    const int32_t column = 64 * static_cast<int32_t>(shared.rank);
    const Chunk chunk = item.chunk_at(use);
    shared.keys_ring.wait_empty_sleeping(use);
    bring_tile(shared.keys(use), 2, chunk.tokens, shared.keys_ring.full(use), shared.key_landing,
               [&](uint32_t barrier) {
                   device::tensor_load_multicast(shared.keys(use) + kPanelBytes * shared.rank, &p.k,
                                                 barrier, {column, item.key_head, chunk.token},
                                                 kBoth);
               });
    if (!shared.owns(use)) {
        return;
    }
    const int32_t own = StateGradientShared::query_use(use);
    shared.queries_ring.wait_empty_sleeping(own);
    bring_tile(shared.queries(use), 2, chunk.tokens, shared.queries_ring.full(own),
               shared.query_landing, [&](uint32_t barrier) {
                   for (int32_t panel = 0; panel < 2; ++panel) {
                       device::tensor_load(shared.queries(use) + kPanelBytes * panel, &p.q, barrier,
                                           {64 * panel, item.key_head, chunk.token});
                   }
               });
}

HCP_DEVICE void bring_rows(const StateGradientParams& p,
                           const StateGradientShared& shared,
                           const StateGradientItem& item) {
    const int32_t column = 64 * static_cast<int32_t>(shared.rank);
    // Places of dO, from where Z leaves, become free late: K and Q do not wait for them.
    for (int32_t use = 0; use <= item.uses; ++use) {
        if (use < item.uses) {
            bring_keys_and_queries(p, shared, item, use);
        }
        if (use > 0) {
            const Chunk chunk = item.chunk_at(use - 1);
            shared.gradients.wait_empty_sleeping(use - 1);
            bring_tile(shared.gradient(use - 1), 1, chunk.tokens, shared.gradients.full(use - 1),
                       shared.gradient_landing, [&](uint32_t barrier) {
                           device::tensor_load(shared.gradient(use - 1), &p.d_o, barrier,
                                               {column, item.head, chunk.token});
                       });
        }
    }
}

/// The exponent of a power of two that all decays of a chunk from its start have in common, so that
/// none of them is lost in fp16; 0 where the largest is a number of fp16 by itself. `first`: the
/// sum to the first token.
HCP_DEVICE float common_decay(float first) {
    constexpr float kLeast = -6.0F;
    return kFp16 && first < kLeast ? std::floor(first) : 0.0F;
}

/// The factors that the chain and, of this block's chunks, the products need, for this lane's two
/// tokens.
HCP_DEVICE void write_factors(const StateGradientShared& shared,
                              int32_t use,
                              const ChunkGates& gates,
                              float scale,
                              const float (&r_q)[2],
                              const float (&r_k)[2]) {
    using Layout = StateGradientLayout;
    const uint32_t lane = device::lane_index();
    const auto put = [&](uint32_t array, float first, float second) {
        device::store_shared(shared.gate(use, array) + 8 * lane, device::Float2{first, second});
    };
    const float a = gates.sum[0], b = gates.sum[1];
    const float q_norm[2] = {scale * rest_of(r_q[0]), scale * rest_of(r_q[1])};
    const float k_norm[2] = {rest_of(r_k[0]), rest_of(r_k[1])};
    const float shift = common_decay(device::shuffle(a, 0));
    put(Layout::kKeyFactor, r_k[0], r_k[1]);
    put(Layout::kReadFactor, device::exp2_approximate(gates.all - a) * k_norm[0],
        device::exp2_approximate(gates.all - b) * k_norm[1]);
    const float decay[2] = {device::exp2_approximate(a - shift),
                            device::exp2_approximate(b - shift)};
    if (lane == 0) {
        device::store_shared(shared.gate(use, 0) + Layout::kChunkDecay,
                             device::Float2{device::exp2_approximate(gates.all - shift),
                                            device::exp2_approximate(shift)});
    }
    if (!shared.owns(use)) {
        return;
    }
    put(Layout::kSum, a, b);
    put(Layout::kOutputFactor, decay[0] * q_norm[0], decay[1] * q_norm[1]);
    put(Layout::kQueryFactor, r_q[0], r_q[1]);
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
}

struct RawFactors {
    RawGates gates;
    float q_norm[2], k_norm[2];
};
HCP_DEVICE RawFactors load_factors(const StateGradientParams& p,
                                   const StateGradientItem& item,
                                   int32_t use) {
    const Chunk chunk = item.chunk_at(use < item.uses ? use : item.uses - 1);
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

/// Of every other chunk. Two warps take turns: the compiler waits for the loads of the next chunk
/// at the end of a step, and they take longer than a chunk.
HCP_DEVICE void bring_gates(const StateGradientParams& p,
                            const StateGradientShared& shared,
                            const StateGradientItem& item,
                            int32_t first) {
    RawFactors next = load_factors(p, item, first);
    for (int32_t use = first; use < item.uses; use += 2) {
        const RawFactors raw = next;
        next = load_factors(p, item, use + 2);
        const ChunkGates gates = scan_gates(raw.gates);
        shared.gates.wait_empty_sleeping(use);
        write_factors(shared, use, gates, p.shape.scale, raw.q_norm, raw.k_norm);
        device::arrive_warp(shared.gates.full(use));
    }
}

/// Says that what was stored of kept chunks from `first` to before `end` is in global memory. By
/// the warp that stored it, and seldom: it waits for stores under way.
HCP_DEVICE void announce(const StateGradientParams& p,
                         const StateGradientItem& item,
                         int32_t first,
                         int32_t end) {
    device::fence_proxy_async_global();
    device::sync_warp();
    const auto lane = static_cast<int32_t>(device::lane_index());
    for (int32_t kept = first + lane; kept < end; kept += 32) {
        const int64_t at =
            int64_t{item.head} * p.shape.num_chunks + item.index_at(item.first_kept + kept);
        device::release_add_global(p.progress.ready + at, 1);
    }
}

/// dH' of each kept chunk, and Z of the one before it, to global memory. Hands Z's place back for
/// the four warps of the chain.
HCP_DEVICE void store_results(const StateGradientParams& p,
                              const StateGradientShared& shared,
                              const StateGradientItem& item) {
    constexpr int32_t kSilence = 32;
    int32_t announced = 0;
    const uint32_t lane = device::lane_index();
    for (int32_t use = item.first_kept; item.first_kept < item.uses && use <= item.uses; ++use) {
        const int32_t kept = use - item.first_kept;
        shared.results.wait_full_sleeping(kept);
        const int64_t at = int64_t{item.head} * p.shape.num_chunks + item.index_at(use);
        if (lane == 0 && use < item.uses) {
            device::bulk_store(
                p.d_states + at * kStateBytes + shared.rank * StateGradientLayout::kTileBytes,
                shared.state(), StateGradientLayout::kTileBytes);
        }
        if (kept > 0) {
            store_panel(p.d_new_values, shared.gradient(use - 1), item.chunk_at(use - 1), item.head,
                        static_cast<int32_t>(shared.rank));
        }
        if (lane == 0) {
            device::bulk_commit();
        }
        device::bulk_wait_read<0>();
        device::sync_warp();
        if (lane == 0) {
            shared.results.arrive_empty(kept);
        }
        if (kept > 0) {
            device::in_place_of_warps<4>([&] { shared.gradients.arrive_empty(use - 1); });
        }
        if (kept > announced + kSilence) {
            device::bulk_wait<1>();
            announce(p, item, announced, kept - 1);
            announced = kept - 1;
        }
    }
    device::bulk_wait<0>();
    announce(p, item, announced, item.uses - item.first_kept);
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
