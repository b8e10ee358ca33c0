#pragma once

// The backward walk over states: for a piece of a segment and a head, in reverse and in bf16
// products with fp32 sums,
//     Z  = P^T dO + dec r_k (K dH')
//     dH = e^B dH' + sum_i s gamma_i r_q_i q_i dO_i^T - W^T Z
// leaving dH' and Z of every chunk of the piece, and the gradient of the segment's start state.
// Launch: clusters of 2, as many as pieces times value heads.

#include "kernels/gdn/cuda/state_gradient_auxiliary.cuh"
#include "kernels/gdn/cuda/state_gradient_producer.cuh"

namespace hybridcp::gdn::cuda {

/// The warpgroup that holds dH' (transposed).
class StateGradientChain {
    using Layout = StateGradientLayout;

  public:
    HCP_DEVICE StateGradientChain(const StateGradientShared& shared)
        : shared_(shared), at_(lane_place()), offset_(transposed_rows_offset(at_)) {}

    HCP_DEVICE void run(const StateGradientParams& p, const StateGradientItem& item) {
        float state[64];
        const int64_t offset = p.shape.state_offset(item.segment, item.head);
        const bool starts = item.from_boundary && p.d_end != nullptr;
        load_state(state, starts ? p.d_end + offset : nullptr, shared_.rank);
        walk(state, item);
        if (item.first_kept < item.uses) {
            const int32_t kept = item.uses - item.first_kept;
            shared_.results.wait_empty(kept);
            publish(kept);
        }
        if (item.to_start && p.d_start != nullptr) {
            store_state(state, p.d_start + offset, shared_.rank);
        }
    }

  private:
    /// What a chunk needs before the state after it.
    struct Ahead {
        uint32_t left[4][4];    // dO^T as left operand
        uint32_t scaled[4][4];  // times s gamma r_q
        float values[32];       // V x tokens: dO^T P
        float decay;            // e^B
    };

    HCP_DEVICE void walk(float (&state)[64], const StateGradientItem& item) const {
        uint32_t packed[8][4];
        Ahead ahead;
        pack_state(packed, state);
        const auto first_of_other = static_cast<int32_t>(shared_.rank ^ 1);
        expect(shared_.scores_ring, first_of_other, item.uses, kPanelBytes);
        expect(shared_.writes_ring, first_of_other, item.uses, Layout::kTileBytes);
        release_state(0, item);
        begin_chunk(ahead, 0, item.uses);
        finish_ahead(ahead);
        for (int32_t use = 0; use < item.uses; ++use) {
            step(state, packed, ahead, item, use);
        }
    }

    /// Of a stage that the other block fills.
    HCP_DEVICE static void expect(const Ring<Layout::kProductStages>& ring,
                                  int32_t use,
                                  int32_t uses,
                                  uint32_t bytes) {
        if (device::thread_index() == 0 && use < uses) {
            device::mbarrier_arrive_expect(ring.full(use), bytes);
        }
    }
    /// The other block's products come by themselves, so their next use is expected at once.
    HCP_DEVICE void wait_products(const Ring<Layout::kProductStages>& ring,
                                  int32_t use,
                                  int32_t uses,
                                  uint32_t bytes) const {
        ring.wait_full(use);
        if (!shared_.owns(use)) {
            expect(ring, use + Layout::kProductStages, uses, bytes);
        }
    }

    /// Leaves a product in flight.
    HCP_DEVICE void begin_chunk(Ahead& ahead, int32_t use, int32_t uses) const {
        shared_.gates.wait_full(use);
        ahead.decay = device::load_shared<float>(shared_.gate(use, 0) + Layout::kChunkDecay);
        load_output_gradients(ahead.left, ahead.scaled, use);
        wait_products(shared_.scores_ring, use, uses, kPanelBytes);
        device::keep_registers(ahead.values);
        keep(ahead.left);
        device::wgmma_fence();
        multiply_scores(ahead.values, ahead.left, use);
        device::wgmma_commit();
    }
    HCP_DEVICE static void finish_ahead(Ahead& ahead) {
        device::wgmma_wait<0>();
        device::keep_registers(ahead.values);
        keep(ahead.left);
    }

    template <int Count>
    HCP_DEVICE static void keep(uint32_t (&operand)[Count][4]) {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            device::keep_registers(operand[i]);
        }
    }

    HCP_DEVICE void step(float (&state)[64],
                         uint32_t (&packed)[8][4],
                         Ahead& ahead,
                         const StateGradientItem& item,
                         int32_t use) const {
        const bool is_kept = use >= item.first_kept;
        float read[32];
        uint32_t left[4][4];
        issue_state_products(read, state, packed, ahead, use);
        if (is_kept) {
            const int32_t kept = use - item.first_kept;
            shared_.results.wait_empty(kept);
            wait_state_place(use);
            store_packed_state(shared_.state(use), packed);
            publish(kept);
        }
        device::wgmma_wait<1>();
        device::keep_registers(read);
        keep(packed);
        release_keys(use);
        add_read(left, ahead.values, read, use);
        wait_products(shared_.writes_ring, use, item.uses, Layout::kTileBytes);
        if (device::thread_index() == 0 && !shared_.owns(use)) {
            device::mbarrier_arrive_cluster(device::map_shared(shared_.writes_sent, owner(use)));
        }
        keep(left);
        device::wgmma_fence();
        add_outer_products(state, left, shared_.writes(use));
        device::wgmma_commit();
        if (is_kept) {
            store_new_values(left, use);
        }
        release_inputs(use, is_kept);
        device::wgmma_wait<1>();
        keep(ahead.scaled);
        arrive_empty_at_both(shared_.queries_ring, use);
        // After the last chunk once more, in vain: a branch would make the compiler wait for all
        // products before it.
        begin_chunk(ahead, use + 1 < item.uses ? use + 1 : use, item.uses);
        device::wgmma_wait<1>();
        device::keep_registers(state);
        keep(left);
        release_state(use + 1, item);
        pack_state(packed, state);
        finish_ahead(ahead);
    }

    /// state^T K^T, and e^B state + what outputs say; the second is waited for last.
    HCP_DEVICE void issue_state_products(float (&read)[32],
                                         float (&state)[64],
                                         uint32_t (&packed)[8][4],
                                         Ahead& ahead,
                                         int32_t use) const {
        shared_.keys_ring.wait_full(use);
        device::keep_registers(read);
        keep(packed);
        device::wgmma_fence();
        multiply_by_keys(read, packed, shared_.keys(use));
        device::wgmma_commit();
#pragma unroll
        for (float& x : state) {
            x *= ahead.decay;
        }
        shared_.queries_ring.wait_full(use);
        device::keep_registers(state);
        keep(ahead.scaled);
        device::wgmma_fence();
        add_outer_products(state, ahead.scaled, shared_.queries(use));
        device::wgmma_commit();
    }

    /// Until all warps, and the copy to the other block, are through with W of the chunk before.
    HCP_DEVICE void wait_state_place(int32_t use) const {
        if (use > 0 && shared_.owns(use - 1)) {
            device::mbarrier_wait(shared_.writes_sent, ((use - 1) >> 1) & 1);
        }
        device::barrier_sync(Layout::kStateBarrier, 128);
    }

    /// Hands over dH' number `kept` and Z of the chunk before, of which the places are free. The
    /// fence takes as long as the products that run meanwhile.
    HCP_DEVICE void publish(int32_t kept) const {
        device::fence_proxy_async();
        device::sync_warp();
        if (device::lane_index() == 0) {
            shared_.results.arrive_full(kept);
        }
    }

    HCP_DEVICE void release_keys(int32_t use) const {
        arrive_empty_at_both(shared_.keys_ring, use);
        if (device::lane_index() == 0) {
            shared_.scores_ring.arrive_empty_at(use, owner(use));
        }
    }
    /// Not right after the loads of factors: an arrival can overtake them.
    HCP_DEVICE void release_inputs(int32_t use, bool is_kept) const {
        device::sync_warp();
        if (device::lane_index() == 0) {
            shared_.gates.arrive_empty(use);
            if (!is_kept) {  // else Z leaves from there
                shared_.gradients.arrive_empty(use);
            }
        }
    }
    /// Of a chunk whose dH' is not kept; else it is stored first.
    HCP_DEVICE void release_state(int32_t use, const StateGradientItem& item) const {
        if (use < item.first_kept && device::lane_index() == 0) {
            shared_.release_state(use);
        }
    }
    [[nodiscard]] HCP_DEVICE static uint32_t owner(int32_t use) {
        return static_cast<uint32_t>(use) & 1;
    }

    /// dO^T as left operand, as it is and times s gamma r_q.
    HCP_DEVICE void load_output_gradients(uint32_t (&left)[4][4],
                                          uint32_t (&scaled)[4][4],
                                          int32_t use) const {
        shared_.gradients.wait_full(use);
        const uint32_t tile = shared_.gradient(use) + offset_;
        const uint32_t factors = shared_.gate(use, Layout::kOutputFactor) + 8 * at_.pair;
#pragma unroll
        for (uint32_t step = 0; step < 4; ++step) {
            device::load_matrix_transposed(left[step], tile + kTokenStepBytes * step);
            const auto first = device::load_shared<device::Float2>(factors + 64 * step);
            const auto second = device::load_shared<device::Float2>(factors + 64 * step + 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const device::Float2 x = device::unpack_bf16(left[step][i]);
                const device::Float2 factor = i < 2 ? first : second;
                scaled[step][i] = device::pack_bf16(x.x * factor.x, x.y * factor.y);
            }
        }
    }
    /// values (V x tokens) = dO^T P
    HCP_DEVICE void multiply_scores(float (&values)[32],
                                    const uint32_t (&left)[4][4],
                                    int32_t use) const {
        const uint64_t tile = device::matrix_descriptor(shared_.scores(use), kPanelBytes, 1024);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            device::wgmma_registers<device::Major::kMn>(
                values, left[step], device::advance(tile, kTokenStepBytes * step), step > 0);
        }
    }
    /// Z^T = values + read * (dec r_k), packed as left operand.
    HCP_DEVICE void add_read(uint32_t (&left)[4][4],
                             const float (&values)[32],
                             const float (&read)[32],
                             int32_t use) const {
        const uint32_t factors = shared_.gate(use, Layout::kReadFactor) + 8 * at_.pair;
#pragma unroll
        for (uint32_t tile = 0; tile < 8; ++tile) {
            const auto factor = device::load_shared<device::Float2>(factors + 32 * tile);
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                const uint32_t j = 4 * tile + 2 * i;
                left[tile >> 1][2 * (tile & 1) + i] = device::pack_bf16(
                    values[j] + read[j] * factor.x, values[j + 1] + read[j + 1] * factor.y);
            }
        }
    }
    /// Where dO was: each warp has its own columns.
    HCP_DEVICE void store_new_values(const uint32_t (&left)[4][4], int32_t use) const {
#pragma unroll
        for (uint32_t step = 0; step < 4; ++step) {
            device::store_matrix_transposed(
                shared_.gradient(use) + offset_ + kTokenStepBytes * step, left[step]);
        }
    }
    const StateGradientShared& shared_;
    LanePlace at_;
    uint32_t offset_;
};

HCP_DEVICE void state_gradient_role(const StateGradientParams& p,
                                    const StateGradientShared& shared,
                                    const StateGradientItem& item) {
    using Layout = StateGradientLayout;
    const uint32_t group = device::shuffle(device::warp_index() >> 2, 0);
    if (group == Layout::kStateGroup) {
        device::increase_registers<Layout::kStateRegisters>();
        StateGradientChain(shared).run(p, item);
    } else if (group == Layout::kAuxiliaryGroup) {
        device::increase_registers<Layout::kAuxiliaryRegisters>();
        StateGradientAuxiliary(p, shared, item).run();
    } else {
        device::decrease_registers<Layout::kProducerRegisters>();
        const uint32_t warp = device::shuffle(device::warp_index() & 3, 0);
        if (warp == 0) {
            bring_rows(p, shared, item);
        } else if (warp == 3) {
            store_results(p, shared, item);
        } else {
            bring_gates(p, shared, item, static_cast<int32_t>(warp) - 1);
        }
    }
}

HCP_DEVICE void state_gradient_kernel(const StateGradientParams& p) {
    const StateGradientShared shared;
    if (device::thread_index() == 0) {
        shared.init();
    }
    const StateGradientItem item = find_item(p, shared.base);
    device::sync_block();
    device::cluster_arrive();
    device::cluster_wait();
    state_gradient_role(p, shared, item);
    device::sync_warp();
    device::cluster_arrive();  // the other block may still write here
    device::cluster_wait();
}

#ifdef __CUDACC__
__global__ void __launch_bounds__(StateGradientLayout::kThreads, 1)
    state_gradient(const __grid_constant__ StateGradientParams p) {
    state_gradient_kernel(p);
}
#endif

}  // namespace hybridcp::gdn::cuda
