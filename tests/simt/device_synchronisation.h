#pragma once

// As src/kernels/cuda/device/synchronisation.cuh.

#include "simt/device_threads.h"

namespace hybridcp::device {

void sync_block(const Site& site = Site::current());
void sync_warp(const Site& site = Site::current());
void barrier_sync(uint32_t id, uint32_t threads, const Site& site = Site::current());
void barrier_arrive(uint32_t id, uint32_t threads, const Site& site = Site::current());
void cluster_arrive(const Site& site = Site::current());
void cluster_wait(const Site& site = Site::current());
uint32_t map_shared(uint32_t address, uint32_t rank, const Site& site = Site::current());

void mbarrier_init(uint32_t barrier, uint32_t arrivals, const Site& site = Site::current());
void mbarrier_arrive(uint32_t barrier, const Site& site = Site::current());
void mbarrier_arrive_cluster(uint32_t barrier, const Site& site = Site::current());
void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes, const Site& site = Site::current());
void mbarrier_expect(uint32_t barrier, uint32_t bytes, const Site& site = Site::current());
/// Returns when the phase has ended, and now and then before.
bool mbarrier_try_wait(uint32_t barrier, uint32_t parity, const Site& site = Site::current());
void mbarrier_wait(uint32_t barrier, uint32_t parity, const Site& site = Site::current());
inline void mbarrier_wait_sleeping(uint32_t barrier,
                                   uint32_t parity,
                                   uint32_t,
                                   const Site& site = Site::current()) {
    mbarrier_wait(barrier, parity, site);
}

void fence_mbarrier_init(const Site& site = Site::current());
void fence_proxy_async(const Site& site = Site::current());
void fence_cluster(const Site& site = Site::current());
// Global memory is the same for all at once, and kernels run one after another.
inline void fence_global() {}
inline void fence_proxy_async_global() {}
inline void launch_dependents() {}
inline void wait_for_prerequisites() {}

}  // namespace hybridcp::device
