#pragma once

// Indices, shuffles, and what a warp asks of the scheduler.

#include "kernels/cuda/device/types.cuh"

namespace hybridcp::device {

HCP_DEVICE uint32_t thread_index() {
    return threadIdx.x;
}
HCP_DEVICE uint32_t lane_index() {
    return threadIdx.x & 31;
}
HCP_DEVICE uint32_t warp_index() {
    return threadIdx.x >> 5;
}
HCP_DEVICE uint32_t block_threads() {
    return blockDim.x;
}
HCP_DEVICE uint32_t block_index() {
    return blockIdx.x;
}
HCP_DEVICE uint32_t block_index_y() {
    return blockIdx.y;
}
HCP_DEVICE uint32_t grid_blocks() {
    return gridDim.x;
}

/// Position of this block in its cluster.
HCP_DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/// Shuffles of 32-bit values among all 32 lanes.
template <class T>
HCP_DEVICE T shuffle_xor(T value, uint32_t mask) {
    return __shfl_xor_sync(0xffffffffU, value, static_cast<int>(mask));
}
template <class T>
HCP_DEVICE T shuffle_up(T value, uint32_t distance) {
    return __shfl_up_sync(0xffffffffU, value, distance);
}
template <class T>
HCP_DEVICE T shuffle_down(T value, uint32_t distance) {
    return __shfl_down_sync(0xffffffffU, value, distance);
}
template <class T>
HCP_DEVICE T shuffle(T value, uint32_t lane) {
    return __shfl_sync(0xffffffffU, value, static_cast<int>(lane));
}

/// Registers a thread of this warpgroup may use from here on: a multiple of 8, from 24 to 256.
template <int Count>
HCP_DEVICE void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
HCP_DEVICE void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

HCP_DEVICE void sleep_ns(uint32_t duration_ns) {
    __nanosleep(duration_ns);
}
HCP_DEVICE uint64_t clock_cycles() {
    return static_cast<uint64_t>(clock64());
}

}  // namespace hybridcp::device
