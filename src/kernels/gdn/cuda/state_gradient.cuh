#pragma once

// The backward walk over states: for a piece of a segment, a head and a half of V's columns, in
// reverse and in bf16 products with fp32 sums,
//     Z  = P^T dO + dec r_k (K dH')
//     dH = e^B dH' + sum_i s gamma_i r_q_i q_i dO_i^T - W^T Z
// leaving dH' and Z of every chunk of the piece, and the gradient of the segment's start state.

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
        uint32_t packed[8][4];
        const int64_t offset = p.shape.state_offset(item.piece.segment, item.head);
        const bool starts = item.range.from_boundary && p.d_end != nullptr;
        load_state(state, starts ? p.d_end + offset : nullptr, item.half);
        pack_state(packed, state);
        for (int32_t use = 0; use < item.uses(); ++use) {
            const int32_t kept = item.is_kept(use) ? item.range.first + use - item.range.main : -1;
            step(state, packed, use, kept);
        }
        publish(item.uses(), -1);
        if (item.range.end == item.order.count && p.d_start != nullptr) {
            store_state(state, p.d_start + offset, item.half);
        }
    }

  private:
    /// Hands over what earlier stmatrix wrote: Z of the chunk before `use`, and dH' where it is
    /// kept. One fence for both; products that run meanwhile hide it.
    HCP_DEVICE void publish(int32_t use, int32_t kept) const {
        device::fence_proxy_async();
        device::sync_warp();
        if (device::lane_index() == 0) {
            if (use > 0) {
                shared_.new_values.arrive_full(use - 1);
            }
            if (kept >= 0) {
                shared_.state_copy.arrive_full(kept);
            }
        }
    }

    HCP_DEVICE void step(float (&state)[64],
                         uint32_t (&packed)[8][4],
                         int32_t use,
                         int32_t kept) const {
        float read[32], values[32];
        uint32_t left[4][4], scaled[4][4];
        if (kept >= 0) {
            shared_.state_copy.wait_empty(kept);
            store_packed_state(shared_.state(), packed);
        }
        issue_read(read, packed, use);
        publish(use, kept);
        shared_.gates.wait_full(use);
        const float decay = device::load_shared<float>(shared_.gate(use, 0) + Layout::kChunkDecay);
#pragma unroll
        for (float& x : state) {
            x *= decay;
        }
        load_output_gradients(left, scaled, use);
        shared_.products.wait_full(use);
        keep(state, values, left, scaled);
        device::wgmma_fence();
        multiply_scores(values, left, use);
        device::wgmma_commit();
        add_outer_products(state, scaled, shared_.queries(use));
        device::wgmma_commit();
        device::wgmma_wait<1>();
        device::keep_registers(read);
        device::keep_registers(values);
        add_read(left, values, read, use);
        for (int i = 0; i < 4; ++i) {
            device::keep_registers(left[i]);
        }
        device::wgmma_fence();
        add_outer_products(state, left, shared_.writes(use));
        device::wgmma_commit();
        store_new_values(left, use);
        device::wgmma_wait<0>();
        device::keep_registers(state);
        release(use);
        pack_state(packed, state);
    }

    HCP_DEVICE void issue_read(float (&read)[32], uint32_t (&packed)[8][4], int32_t use) const {
        shared_.rows.wait_full(use);
        device::keep_registers(read);
        for (int i = 0; i < 8; ++i) {
            device::keep_registers(packed[i]);
        }
        device::wgmma_fence();
        multiply_by_keys(read, packed, shared_.keys(use));
        device::wgmma_commit();
    }

    HCP_DEVICE static void keep(float (&state)[64],
                                float (&values)[32],
                                uint32_t (&left)[4][4],
                                uint32_t (&scaled)[4][4]) {
        device::keep_registers(state);
        device::keep_registers(values);
        for (int i = 0; i < 4; ++i) {
            device::keep_registers(left[i]);
            device::keep_registers(scaled[i]);
        }
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
    HCP_DEVICE void release(int32_t use) const {
        device::sync_warp();
        if (device::lane_index() == 0) {
            shared_.rows.arrive_empty(use);
            shared_.gates.arrive_empty(use);
            shared_.products.arrive_empty(use);
        }
    }

    const StateGradientShared& shared_;
    LanePlace at_;
    uint32_t offset_;
};

HCP_DEVICE StateGradientItem find_item(const StateGradientParams& p, uint32_t scratch) {
    StateGradientItem item;
    const auto block = static_cast<int32_t>(device::block_index());
    item.half = static_cast<uint32_t>(block & 1);
    item.head = (block >> 1) % p.shape.value_heads;
    item.key_head = item.head / p.shape.group();
    item.piece = load_piece(p.pieces + (block >> 1) / p.shape.value_heads);
    const Chunk first = device::load_global(p.chunks + item.piece.first_chunk);
    const Chunk last =
        device::load_global(p.chunks + item.piece.first_chunk + item.piece.chunks - 1);
    item.first_token = first.token;
    item.end_token = last.token + last.tokens;
    item.order = {p.chunks, item.piece.first_chunk, item.piece.chunks, true};
    item.range =
        p.d_states == nullptr
            ? find_summary_range(item.order, p.gates, item.head, p.summary_floor, scratch)
            : find_walk_range(item.order, item.piece, p.gates, item.head, p.may_truncate, scratch);
    return item;
}

HCP_DEVICE void state_gradient_kernel(const StateGradientParams& p) {
    using Layout = StateGradientLayout;
    const StateGradientShared shared;
    const StateGradientItem item = find_item(p, shared.base);
    if (device::thread_index() == 0) {
        shared.init();
    }
    device::sync_block();
    const uint32_t group = device::warp_index() >> 2;
    if (group == Layout::kStateGroup) {
        device::increase_registers<Layout::kStateRegisters>();
        StateGradientChain(shared).run(p, item);
    } else if (group == Layout::kAuxiliaryGroup) {
        device::increase_registers<Layout::kAuxiliaryRegisters>();
        StateGradientAuxiliary(shared).run(item.uses());
    } else {
        device::decrease_registers<Layout::kProducerRegisters>();
        const uint32_t warp = device::warp_index() & 3;
        if (warp == 0) {
            bring_rows(p, shared, item);
        } else if (warp == 1) {
            bring_gates(p, shared, item);
        } else if (warp == 2) {
            bring_output_gradients(p, shared, item);
        } else if (device::lane_index() == 0) {
            store_results(p, shared, item);
        }
    }
}

#ifdef __CUDACC__
__global__ void __launch_bounds__(StateGradientLayout::kThreads, 1)
    state_gradient(const __grid_constant__ StateGradientParams p) {
    state_gradient_kernel(p);
}
#endif

}  // namespace hybridcp::gdn::cuda
