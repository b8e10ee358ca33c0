#pragma once

// Stages of shared memory that go round between warps that fill and warps that read: a pair of
// mbarriers each. Use number i of the ring is in stage i % Stages.

#include "kernels/cuda/device.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

template <int Stages>
struct Ring {
    uint32_t barriers;  // Stages "full", then Stages "empty"

    static constexpr uint32_t kBytes = 16 * Stages;

    /// By one thread, before anyone uses it.
    HCP_DEVICE void init(uint32_t full_arrivals, uint32_t empty_arrivals) const {
        for (uint32_t i = 0; i < Stages; ++i) {
            device::mbarrier_init(barriers + 8 * i, full_arrivals);
            device::mbarrier_init(barriers + 8 * (Stages + i), empty_arrivals);
        }
    }
    [[nodiscard]] static HCP_DEVICE uint32_t stage(int32_t use) {
        return static_cast<uint32_t>(use) % Stages;
    }
    [[nodiscard]] static HCP_DEVICE uint32_t parity(int32_t use) {
        return (static_cast<uint32_t>(use) / Stages) & 1;
    }
    [[nodiscard]] HCP_DEVICE uint32_t full(int32_t use) const { return barriers + 8 * stage(use); }
    [[nodiscard]] HCP_DEVICE uint32_t empty(int32_t use) const {
        return barriers + 8 * (Stages + stage(use));
    }
    HCP_DEVICE void wait_full(int32_t use) const { device::mbarrier_wait(full(use), parity(use)); }
    HCP_DEVICE void wait_empty(int32_t use) const {
        device::mbarrier_wait(empty(use), parity(use) ^ 1);
    }
    /// For producers: their spinning would take issue slots from warps that work.
    HCP_DEVICE void wait_full_sleeping(int32_t use) const {
        device::mbarrier_wait_sleeping(full(use), parity(use), kSleepNs);
    }
    HCP_DEVICE void wait_empty_sleeping(int32_t use) const {
        device::mbarrier_wait_sleeping(empty(use), parity(use) ^ 1, kSleepNs);
    }
    HCP_DEVICE void arrive_empty(int32_t use) const { device::mbarrier_arrive(empty(use)); }

    /// At block `rank` of the cluster.
    HCP_DEVICE void arrive_empty_at(int32_t use, uint32_t rank) const {
        device::mbarrier_arrive_cluster(device::map_shared(empty(use), rank));
    }

    static constexpr uint32_t kSleepNs = 20;
};

/// Rows from `first` on of a panel become zeros; one warp. Its fence comes before the arrival that
/// hands the panel over.
HCP_DEVICE void clear_rows(uint32_t panel, int32_t first) {
    for (int32_t i = 8 * first + static_cast<int32_t>(device::lane_index()); i < 8 * 64; i += 32) {
        device::store_shared(panel + 16 * static_cast<uint32_t>(i), device::Word4{0, 0, 0, 0});
    }
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
