#pragma once

// How warps count themselves in at an mbarrier: lane 0 arrives, after something that brings the
// lanes together (sync_warp, or what waits for products). compute-sanitizer's racecheck does not
// follow that one lane's arrival speaks for the others. With HCP_EVERY_LANE_ARRIVES, for that tool
// alone, all lanes arrive, and barriers count 32 a warp.

#include "kernels/cuda/device/types.cuh"

namespace hybridcp::device {

#ifdef HCP_EVERY_LANE_ARRIVES
constexpr bool kEveryLaneArrives = true;
#else
constexpr bool kEveryLaneArrives = false;
#endif

/// The arrivals of `warps` warps, for mbarrier_init.
HCP_DEVICE constexpr uint32_t warp_arrivals(uint32_t warps) {
    return kEveryLaneArrives ? 32 * warps : warps;
}
/// Whether this lane arrives for its warp; the lanes have met before.
HCP_DEVICE bool arrives_for_warp(uint32_t lane = lane_index()) {
    return kEveryLaneArrives || lane == 0;
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
    if (kEveryLaneArrives && lane_index() != 0) {
        mbarrier_arrive(barrier);
    }
}
/// Calls `arrive` in the place of `Warps` warps that do not arrive themselves; the lanes have met.
template <uint32_t Warps, class Arrive>
HCP_DEVICE void in_place_of_warps(Arrive arrive) {
    if constexpr (kEveryLaneArrives) {
        for (uint32_t warp = 0; warp < Warps; ++warp) {
            arrive();
        }
    } else if (lane_index() < Warps) {
        arrive();
    }
}

/// The arrivals of a warpgroup for which one thread arrives, or all if kEveryLaneArrives.
constexpr uint32_t kWarpgroupArrivals = kEveryLaneArrives ? 128 : 1;

}  // namespace hybridcp::device
