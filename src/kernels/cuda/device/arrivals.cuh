#pragma once

// How warps count themselves in at an mbarrier: lane 0 arrives, after something that brings the
// lanes together (sync_warp, or what waits for products). racecheck does not follow that one lane's
// arrival speaks for the others: for it all lanes arrive, and barriers count 32 a warp.

#include "kernels/cuda/device/racecheck.cuh"

namespace hybridcp::device {

/// The arrivals of `warps` warps, for mbarrier_init.
HCP_DEVICE constexpr uint32_t warp_arrivals(uint32_t warps) {
    return kRacecheck ? 32 * warps : warps;
}
/// Whether this lane arrives for its warp; the lanes have met before.
HCP_DEVICE bool arrives_for_warp(uint32_t lane = lane_index()) {
    return kRacecheck || lane == 0;
}
/// Counts this warp in after all its lanes.
HCP_DEVICE void arrive_warp(uint32_t barrier) {
    sync_warp();
    if (arrives_for_warp()) {
        mbarrier_arrive(barrier);
    }
}
/// The rest of a warp whose lane 0 arrives with the bytes of a copy, where others arrive as warps.
HCP_DEVICE void arrive_beside_copy(uint32_t barrier) {
    if (kRacecheck && lane_index() != 0) {
        mbarrier_arrive(barrier);
    }
}
/// The same where that lane is alone.
HCP_DEVICE void arrive_beside_copy_alone(uint32_t barrier) {
    for (int lane = 1; kRacecheck && lane < 32; ++lane) {
        mbarrier_arrive(barrier);
    }
}
/// Calls `arrive` in the place of `Warps` warps that do not arrive themselves; the lanes have met.
template <uint32_t Warps, class Arrive>
HCP_DEVICE void in_place_of_warps(Arrive arrive) {
    if constexpr (kRacecheck) {
        for (uint32_t warp = 0; warp < Warps; ++warp) {
            arrive();
        }
    } else if (lane_index() < Warps) {
        arrive();
    }
}

/// The arrivals of a warpgroup for which one thread arrives, or all if kRacecheck.
constexpr uint32_t kWarpgroupArrivals = kRacecheck ? 128 : 1;

}  // namespace hybridcp::device
