#pragma once

// The warpgroup that makes -W, and fp16 of K.

#include "kernels/gdn/cuda/state_gradient_auxiliary.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

class StateGradientWrites : StateGradientAuxiliary {
  public:
    HCP_DEVICE StateGradientWrites(const StateGradientParams& p,
                                   const StateGradientShared& shared,
                                   const StateGradientItem& item)
        : StateGradientAuxiliary(shared, item), p_(p) {}

    HCP_DEVICE void run() const {
        const auto first = static_cast<int32_t>(shared_.rank);
        bring_inverse(first);
        if (kFp16 && first == 1) {
            convert_keys_of_other(0);
        }
        for (int32_t use = first; use < item_.uses; use += 2) {
            shared_.gates.wait_full(use);
            if constexpr (kFp16) {
                convert_keys(use);
            }
            make_writes(use);
        }
    }

  private:
    /// T of a chunk of this block, when all have read that of the chunk before.
    HCP_DEVICE void bring_inverse(int32_t use) const {
        if (device::thread_index() % 128 == 0 && use < item_.uses) {
            const int64_t at = int64_t{item_.head} * p_.shape.num_chunks + item_.index_at(use);
            device::mbarrier_arrive_expect(shared_.inverse_full, kInverseBytes);
            device::bulk_load(shared_.inverse(), p_.inverses + at * kInverseBytes, kInverseBytes,
                              shared_.inverse_full);
        }
    }

    /// In place, times the power of two in r_k. By each block for itself: panels from the other
    /// block came too late.
    HCP_DEVICE void convert_keys(int32_t use) const {
        const uint32_t thread = device::thread_index() % 128;
        const uint32_t norms = shared_.gate(use, Layout::kKeyFactor) + 4 * (thread / 8);
        uint32_t powers[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            powers[i] = bf16_pair(power_in(device::load_shared<float>(norms + 64 * i)));
        }
        shared_.keys_ring.wait_full(use);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
            const uint32_t at = shared_.keys(use) + 2048 * i + 16 * thread;
            device::store_shared(at, to_f16(device::load_shared<device::Word4>(at), powers[i & 3]));
        }
        device::fence_proxy_async();
        device::arrive_warp(shared_.key_ready(use));
    }

    /// Of a chunk of which this block makes no products.
    HCP_DEVICE void convert_keys_of_other(int32_t use) const {
        if (use < item_.uses) {
            shared_.gates.wait_full(use);
            convert_keys(use);
            release_gates(use);
        }
    }

    HCP_DEVICE void make_writes(int32_t use) const {
        float writes[64];
        uint32_t left[4][4];
        device::mbarrier_wait(shared_.inverse_full, (use >> 1) & 1);
        load_inverse(left, use);
        shared_.wait_keys(use);
        multiply_inverse(writes, left, use);
        device::wgmma_commit();
        release_gates(use);
        device::barrier_sync(Layout::kWriteBarrier, 128);
        bring_inverse(use + 2);
        if constexpr (kFp16) {
            convert_keys_of_other(use + 1);
        }
        shared_.writes_ring.wait_empty(use);
        device::wgmma_wait<0>();
        device::keep_registers(writes);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            device::keep_registers(left[step]);
        }
        arrive_empty_at_both(shared_.keys_ring, use);
        store_rows(writes, shared_.writes(use));
        publish<Layout::kWriteBarrier>();
        hand_over(shared_.writes_ring.full(use), shared_.writes(use), Layout::kTileBytes);
    }

    /// T diag(-beta gamma r_k); blocks above the diagonal are zero.
    HCP_DEVICE void load_inverse(uint32_t (&left)[4][4], int32_t use) const {
        const uint32_t tile = shared_.inverse();
        const uint32_t row = inverse_row(8 * (at_.matrix & 1) + at_.matrix_row, at_.matrix >> 1);
        const uint32_t factors = shared_.gate(use, Layout::kWriteFactor) + 8 * at_.pair;
#pragma unroll
        for (uint32_t block = 0; block < 4; ++block) {
            uint32_t entries[4];
            device::load_matrix(entries, tile + inverse_block(at_.warp, block) + row);
            const auto first = device::load_shared<device::Float2>(factors + 64 * block);
            const auto second = device::load_shared<device::Float2>(factors + 64 * block + 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const device::Float2 entry = device::unpack_f16(entries[i]);
                const device::Float2 factor = i < 2 ? first : second;
                const uint32_t scaled = pack_operand(entry.x * factor.x, entry.y * factor.y);
                left[block][i] = block <= at_.warp ? scaled : 0;
            }
        }
    }
    HCP_DEVICE void multiply_inverse(float (&writes)[64],
                                     uint32_t (&left)[4][4],
                                     int32_t use) const {
        const uint64_t keys = device::matrix_descriptor(shared_.keys(use), kPanelBytes, 1024);
        device::keep_registers(writes);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            device::keep_registers(left[step]);
        }
        device::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            multiply_registers<device::Major::kMn>(
                writes, left[step], device::advance(keys, kTokenStepBytes * step), step > 0);
        }
    }

    const StateGradientParams& p_;
};

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
