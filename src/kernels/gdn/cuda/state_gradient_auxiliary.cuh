#pragma once

// What the auxiliary warpgroups of the backward walk share. Off the chain of states they make
//     -W = -T diag(beta gamma r_k) K,    P = s (r_q Q)(r_k K)^T o Gam,    U = s gamma r_q Q - P W
// of every other chunk, for both blocks, and fp16 of K if operands are. Where a chunk's
// gates leave little of what was before it, W and U are divided by 2^shift (write_factors).

#include "kernels/gdn/cuda/state_gradient_layout.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

class StateGradientAuxiliary {
  protected:
    using Layout = StateGradientLayout;

    HCP_DEVICE StateGradientAuxiliary(const StateGradientShared& shared,
                                      const StateGradientItem& item)
        : shared_(shared), item_(item), at_(lane_place()) {}

    /// What all warps stored can be read by products and copies.
    template <uint32_t kBarrier>
    HCP_DEVICE static void publish() {
        device::fence_proxy_async();
        device::barrier_sync(kBarrier, 128);
    }
    /// To the chain here, and with a copy to that of the other block.
    HCP_DEVICE void hand_over(uint32_t full, uint32_t tile, uint32_t bytes) const {
        if (device::thread_index() % 128 == 0) {
            const uint32_t other = shared_.rank ^ 1;
            if constexpr (!device::kRacecheck) {
                device::mbarrier_arrive(full);
            }
            device::bulk_copy_cluster(device::map_shared(tile, other), tile, bytes,
                                      device::map_shared(full, other));
        }
        if constexpr (device::kRacecheck) {  // after what the copy loads for it
            device::mbarrier_arrive(full);
        }
    }
    HCP_DEVICE void release_gates(int32_t use) const {
        device::arrive_warp(shared_.gates.empty(use));
    }

    /// The address of this lane's row for stmatrix, piece `piece` of 16 bytes.
    [[nodiscard]] HCP_DEVICE uint32_t store_offset(uint32_t piece) const {
        const uint32_t row = 16 * at_.warp + 8 * (at_.matrix & 1) + at_.matrix_row;
        return device::swizzle_128(128 * row + 16 * piece);
    }
    /// 64 rows of 128 columns, to two panels.
    HCP_DEVICE void store_rows(const float (&rows)[64], uint32_t tile) const {
#pragma unroll
        for (uint32_t block = 0; block < 8; ++block) {
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                packed[i] = pack_operand(rows[8 * block + 2 * i], rows[8 * block + 2 * i + 1]);
            }
            device::store_matrix(tile + kPanelBytes * (block >> 2) +
                                     store_offset((2 * block & 7) + (at_.matrix >> 1)),
                                 packed);
        }
    }

    const StateGradientShared& shared_;
    const StateGradientItem& item_;
    LanePlace at_;
};

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
