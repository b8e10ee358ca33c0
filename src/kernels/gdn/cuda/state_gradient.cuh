#pragma once

// The backward walk over states: for a piece of a segment and a head, in reverse with
// fp32 sums, all of it divided by 2^(the head's exponent),
//     Z  = P^T dO + dec r_k (K dH')
//     dH = e^B dH' + U^T dO - W^T (dec r_k (K dH'))        U = s gamma r_q Q - P W
// leaving dH' and Z of every chunk of the piece, and the gradient of the segment's start state.
// Launch: clusters of 2, as many as pieces times value heads.

#include "kernels/gdn/cuda/state_gradient_producer.cuh"
#include "kernels/gdn/cuda/state_gradient_updates.cuh"
#include "kernels/gdn/cuda/state_gradient_writes.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

/// The warpgroup that holds dH' (transposed).
class StateGradientChain {
    using Layout = StateGradientLayout;

  public:
    HCP_DEVICE StateGradientChain(const StateGradientShared& shared)
        : shared_(shared), at_(lane_place()), offset_(transposed_rows_offset(at_)) {}

    HCP_DEVICE void run(const StateGradientParams& p, const StateGradientItem& item) {
        float state[64];
        const int exponent = exponent_of_gradients(p.largest + item.head, p.shape);
        down_ = kFp16 ? device::shuffle(bf16_pair(power_of_two_within(-exponent)), 0) : 0;
        const int64_t offset = p.shape.state_offset(item.segment, item.head);
        const bool starts = item.from_boundary && p.d_end != nullptr;
        load_state(state, starts ? p.d_end + offset : nullptr, shared_.rank,
                   power_of_two_within(-exponent));
        walk(state, item);
        if (item.to_start && p.d_start != nullptr) {
            const int up = exponent_of_gradients(p.largest + item.head, p.shape);
            store_state(state, p.d_start + offset, shared_.rank, power_of_two_within(up));
        }
    }

  private:
    HCP_DEVICE void walk(float (&state)[64], const StateGradientItem& item) const {
        uint32_t packed[8][4];
        uint32_t values[4][4];  // Z^T of the chunk before
        const auto first_of_other = static_cast<int32_t>(shared_.rank ^ 1);
        const int32_t scores = item.uses - item.first_score();
        expect(shared_.scores_ring, first_of_other, scores, kPanelBytes);
        expect(shared_.writes_ring, first_of_other, item.uses, Layout::kTileBytes);
        expect(shared_.updates_ring, first_of_other, item.uses, Layout::kTileBytes);
        pack_state(packed, state);
        for (int32_t use = 0; use < item.first_kept; ++use) {
            step<false>(state, packed, values, item, use);
        }
        if ((item.first_kept & 1) != 0) {  // P was made for nothing
            wait_products(shared_.scores_ring, 0, scores, kPanelBytes);
            release_products(shared_.scores_ring, 0);
        }
        for (int32_t use = item.first_kept; use < item.uses; ++use) {
            step<true>(state, packed, values, item, use);
        }
        if (item.first_kept < item.uses) {
            const int32_t kept = item.uses - item.first_kept;
            shared_.results.wait_empty(kept);
            store_new_values(values, item.uses - 1);
            publish(kept);
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

    /// By all warps, at the block that made them.
    HCP_DEVICE static void release_products(const Ring<Layout::kProductStages>& ring, int32_t use) {
        if (device::arrives_for_warp()) {
            ring.arrive_empty_at(use, owner(use));
        }
    }

    template <int Count>
    HCP_DEVICE static void keep(uint32_t (&operand)[Count][4]) {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            device::keep_registers(operand[i]);
        }
    }

    template <bool kKept>
    HCP_DEVICE void step(float (&state)[64],
                         uint32_t (&packed)[8][4],
                         uint32_t (&values)[4][4],
                         const StateGradientItem& item,
                         int32_t use) const {
        float read[32];
        uint32_t outputs[4][4], left[4][4];
        read_state(read, state, packed, outputs, use);
        device::Float2 factors[8];
        load_read_factors(factors, use);
        const auto shift = device::load_shared<float>(shared_.gate(use, 0) + Layout::kChunkShift);
        device::wgmma_wait<0>();
        device::keep_registers(read);
        keep(packed);
        arrive_empty_at_both(shared_.keys_ring, use);
        scale_read(left, read, factors);
        wait_products(shared_.writes_ring, use, item.uses, Layout::kTileBytes);
        device::keep_registers(state);
        keep(left);
        device::wgmma_fence();
        add_outer_products(state, left, shared_.writes(use));
        device::wgmma_commit();
        // U last: it is made from W, and comes from further away than from here half of the times.
        wait_products(shared_.updates_ring, use, item.uses, Layout::kTileBytes);
        keep(outputs);
        device::wgmma_fence();
        add_outer_products(state, outputs, shared_.updates(use));
        device::wgmma_commit();
        if constexpr (kKept) {
            issue_new_values(read, outputs, item, use);
            hand_over_state(packed, values, item, use);
        }
        device::arrive_warp(shared_.gates.empty(use));
        device::wgmma_wait<kKept ? 1 : 0>();
        device::keep_registers(state);
        keep(left);
        release_products(shared_.updates_ring, use);
        release_products(shared_.writes_ring, use);
        if (kFp16 && shift != 1.0F) {
            multiply(state, shift);
        }
        pack_state(packed, state);
        if constexpr (kKept) {
            finish_new_values(values, read, outputs, item, use);
        } else {
            keep(outputs);
            if (device::arrives_for_warp()) {
                shared_.gradients.arrive_empty(use);
            }
        }
    }

    /// state^T K^T; while that runs, dO and e^B state.
    HCP_DEVICE void read_state(float (&read)[32],
                               float (&state)[64],
                               uint32_t (&packed)[8][4],
                               uint32_t (&outputs)[4][4],
                               int32_t use) const {
        shared_.wait_keys(use);
        device::keep_registers(read);
        keep(packed);
        device::wgmma_fence();
        multiply_by_keys(read, packed, shared_.keys(use));
        device::wgmma_commit();
        shared_.gates.wait_full(use);
        const auto decay = device::load_shared<float>(shared_.gate(use, 0) + Layout::kChunkDecay);
        shared_.gradients.wait_full(use);
#pragma unroll
        for (uint32_t step = 0; step < 4; ++step) {
            device::load_matrix_transposed(
                outputs[step], shared_.gradient(use) + offset_ + kTokenStepBytes * step);
#pragma unroll
            for (uint32_t& pair : outputs[step]) {
                pair = kFp16 ? to_f16(pair, down_) : pair;
            }
        }
        multiply(state, decay);
    }
    HCP_DEVICE static void multiply(float (&state)[64], float factor) {
#pragma unroll
        for (float& x : state) {
            x *= factor;
        }
    }

    /// dH' of a chunk and Z of the one before, while products run.
    HCP_DEVICE void hand_over_state(const uint32_t (&packed)[8][4],
                                    const uint32_t (&values)[4][4],
                                    const StateGradientItem& item,
                                    int32_t use) const {
        const int32_t kept = use - item.first_kept;
        if (kept > 0) {
            store_new_values(values, use - 1);
        }
        shared_.results.wait_empty(kept);
        store_packed_state(shared_.state(), packed);
        publish(kept);
    }

    /// Z^T = read + dO^T P
    HCP_DEVICE void issue_new_values(float (&read)[32],
                                     uint32_t (&outputs)[4][4],
                                     const StateGradientItem& item,
                                     int32_t use) const {
        wait_products(shared_.scores_ring, item.score_use(use), item.uses - item.first_score(),
                      kPanelBytes);
        const uint64_t tile = device::matrix_descriptor(shared_.scores(use), kPanelBytes, 1024);
        device::keep_registers(read);
        keep(outputs);
        device::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            multiply_registers<device::Major::kMn>(
                read, outputs[step], device::advance(tile, kTokenStepBytes * step), true);
        }
        device::wgmma_commit();
    }
    HCP_DEVICE void finish_new_values(uint32_t (&values)[4][4],
                                      float (&read)[32],
                                      uint32_t (&outputs)[4][4],
                                      const StateGradientItem& item,
                                      int32_t use) const {
        device::wgmma_wait<0>();
        device::keep_registers(read);
        keep(outputs);
        release_products(shared_.scores_ring, item.score_use(use));
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            values[i >> 2][i & 3] = pack_operand(read[2 * i], read[2 * i + 1]);
        }
    }

    /// Hands over dH' number `kept` and Z of the chunk before, of which the places are free. The
    /// fence takes as long as the products that run meanwhile.
    HCP_DEVICE void publish(int32_t kept) const {
        device::fence_proxy_async();
        device::arrive_warp(shared_.results.full(kept));
    }

    [[nodiscard]] HCP_DEVICE static uint32_t owner(int32_t use) {
        return static_cast<uint32_t>(use) & 1;
    }

    HCP_DEVICE void load_read_factors(device::Float2 (&factors)[8], int32_t use) const {
        const uint32_t at = shared_.gate(use, Layout::kReadFactor) + 8 * at_.pair;
#pragma unroll
        for (uint32_t tile = 0; tile < 8; ++tile) {
            factors[tile] = device::load_shared<device::Float2>(at + 32 * tile);
        }
    }
    /// read * (dec r_k), and the same packed as left operand.
    HCP_DEVICE static void scale_read(uint32_t (&left)[4][4],
                                      float (&read)[32],
                                      const device::Float2 (&factors)[8]) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            read[2 * i] *= factors[i >> 1].x;
            read[2 * i + 1] *= factors[i >> 1].y;
            left[i >> 2][i & 3] = pack_operand(read[2 * i], read[2 * i + 1]);
        }
    }
    /// Where dO was: each warp has its own columns.
    HCP_DEVICE void store_new_values(const uint32_t (&values)[4][4], int32_t use) const {
#pragma unroll
        for (uint32_t step = 0; step < 4; ++step) {
            device::store_matrix_transposed(
                shared_.gradient(use) + offset_ + kTokenStepBytes * step, values[step]);
        }
    }
    const StateGradientShared& shared_;
    LanePlace at_;
    uint32_t offset_;
    uint32_t down_ = 0;  // 2^-exponent, twice in bf16
};

HCP_DEVICE void state_gradient_role(const StateGradientParams& p,
                                    const StateGradientShared& shared,
                                    const StateGradientItem& item) {
    using Layout = StateGradientLayout;
    const uint32_t group = device::shuffle(device::warp_index() >> 2, 0);
    if (group == Layout::kStateGroup) {
        device::increase_registers<Layout::kStateRegisters>();
        StateGradientChain(shared).run(p, item);
    } else if (group == Layout::kUpdateGroup) {
        device::increase_registers<Layout::kUpdateRegisters>();
        StateGradientUpdates(p, shared, item).run();
    } else if (group == Layout::kWriteGroup) {
        device::decrease_registers<Layout::kWriteRegisters>();
        StateGradientWrites(p, shared, item).run();
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

/// Nothing is ready yet.
HCP_DEVICE void begin_progress(const StateGradientParams& p,
                               const StateGradientShared& shared,
                               const StateGradientItem& item) {
    if (p.progress.ready == nullptr || shared.rank > 0) {
        return;
    }
    const auto thread = static_cast<int32_t>(device::thread_index());
    for (int32_t use = item.first_kept + thread; use < item.uses;
         use += static_cast<int32_t>(device::block_threads())) {
        device::store_global(
            p.progress.ready + int64_t{item.head} * p.shape.num_chunks + item.index_at(use), 0U);
    }
    if (device::block_index() == 0 && thread == 0) {
        device::store_global(p.progress.items, 0U);
    }
    device::fence_global();
}

HCP_DEVICE void state_gradient_kernel(const StateGradientParams& p) {
    const StateGradientShared shared;
    if (device::thread_index() == 0) {
        shared.init();
    }
    const StateGradientItem item = find_item(p, shared.base);
    if (device::thread_index() == 0) {
        device::wait_for_prerequisites();  // before what other kernels leave
    }
    device::sync_block();
    begin_progress(p, shared, item);
    device::cluster_arrive();
    device::cluster_wait();
    device::launch_dependents();
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

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
