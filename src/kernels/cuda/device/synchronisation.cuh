#pragma once

// Barriers of a warp, a block and a cluster, mbarriers and fences. An mbarrier counts arrivals and
// bytes: a phase ends when both are complete, and waiting for parity p returns once the phase of
// that parity has ended, so a fresh one lets parity 1 pass at once.

#include "kernels/cuda/device/types.cuh"

namespace hybridcp::device {

HCP_DEVICE void sync_block() {
    __syncthreads();
}
HCP_DEVICE void sync_warp() {
    __syncwarp();
}

/// Named barrier `id` (1 to 15; 0 is sync_block's) of `threads` threads, a multiple of 32.
HCP_DEVICE void barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Counts this warp in without waiting.
HCP_DEVICE void barrier_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

HCP_DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
HCP_DEVICE void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// The address of the same place in the shared memory of block `rank` of the cluster.
HCP_DEVICE uint32_t map_shared(uint32_t address, uint32_t rank) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

HCP_DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}
HCP_DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives at a barrier of any block of the cluster; the address comes from map_shared.
HCP_DEVICE void mbarrier_arrive_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives, and makes the phase wait for `bytes` of asynchronous copies besides.
HCP_DEVICE void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
/// Adds bytes to the phase without an arrival.
HCP_DEVICE void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}
/// Whether the phase has ended; may sleep a while before it says no.
HCP_DEVICE bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    constexpr uint32_t kMostNs = 10'000'000;
    uint32_t ended;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(ended)
        : "r"(barrier), "r"(parity), "r"(kMostNs)
        : "memory");
    return ended != 0;
}
HCP_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}
/// For producer warps: a spinning warp takes issue slots from the warps that work.
HCP_DEVICE void mbarrier_wait_sleeping(uint32_t barrier, uint32_t parity, uint32_t sleep_ns) {
    while (!mbarrier_try_wait(barrier, parity)) {
        __nanosleep(sleep_ns);
    }
}

/// Makes the mbarriers that this thread initialised visible to the cluster and to TMA.
HCP_DEVICE void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Makes this thread's global memory writes visible to all that see what it writes after.
HCP_DEVICE void fence_global() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
/// Orders this thread's view of global memory with its copies, before and after.
HCP_DEVICE void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
/// The next kernel, if it was launched for that, may begin where all blocks of this one have said
/// so, or ended.
HCP_DEVICE void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
/// Waits until the kernel before this one, which it was launched to overlap, has ended.
HCP_DEVICE void wait_for_prerequisites() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
/// Makes this thread's shared memory writes visible to wgmma and TMA; before the synchronisation
/// that hands over.
HCP_DEVICE void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
HCP_DEVICE void fence_cluster() {
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
}

}  // namespace hybridcp::device
