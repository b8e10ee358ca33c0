#pragma once

// As src/kernels/cuda/device/memory.cuh and bulk_copy.cuh.

#include "simt/device_threads.h"
#include "simt/launch.h"

namespace hybridcp::device {

using TensorMap = simt::TensorMap;

uint32_t shared_base();
void read_shared(uint32_t address, void* to, uint32_t bytes, const Site& site);
void write_shared(uint32_t address, const void* from, uint32_t bytes, const Site& site);
void read_cluster(uint32_t address, void* to, uint32_t bytes, const Site& site);
void write_cluster(uint32_t address, const void* from, uint32_t bytes, const Site& site);
void check_global_access(const void* address, uint32_t bytes, bool write, const Site& site);

template <class T>
concept Accessible = sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16;

template <Accessible T>
T load_shared(uint32_t address, const Site& site = Site::current()) {
    T value;
    read_shared(address, &value, sizeof(T), site);
    return value;
}
template <Accessible T>
void store_shared(uint32_t address, T value, const Site& site = Site::current()) {
    write_shared(address, &value, sizeof(T), site);
}
template <Accessible T>
T load_cluster(uint32_t address, const Site& site = Site::current()) {
    T value;
    read_cluster(address, &value, sizeof(T), site);
    return value;
}
template <Accessible T>
void store_cluster(uint32_t address, T value, const Site& site = Site::current()) {
    write_cluster(address, &value, sizeof(T), site);
}
void store_cluster_async(uint32_t to,
                         Float4 value,
                         uint32_t barrier,
                         const Site& site = Site::current());
template <class T>
T load_global(const T* address, const Site& site = Site::current()) {
    check_global_access(address, sizeof(T), false, site);
    return *address;
}
inline void prefetch_global(const void* address, const Site& site = Site::current()) {
    check_global_access(address, 1, false, site);
}
template <class T>
void store_global(T* address, T value, const Site& site = Site::current()) {
    check_global_access(address, sizeof(T), true, site);
    *address = value;
}
inline void atomic_max_global(uint32_t* address,
                              uint32_t value,
                              const Site& site = Site::current()) {
    check_global_access(address, sizeof(value), true, site);
    *address = *address < value ? value : *address;
}
inline uint32_t atomic_add_global(uint32_t* address,
                                  uint32_t value,
                                  const Site& site = Site::current()) {
    check_global_access(address, sizeof(value), true, site);
    const uint32_t before = *address;
    *address += value;
    return before;
}
inline void release_add_global(uint32_t* address,
                               uint32_t value,
                               const Site& site = Site::current()) {
    atomic_add_global(address, value, site);
}
inline uint32_t load_acquire_global(const uint32_t* address, const Site& site = Site::current()) {
    return load_global(address, site);
}

struct TensorPosition {
    int32_t x, y, z;
};
void bulk_load(uint32_t to,
               const void* from,
               uint32_t bytes,
               uint32_t barrier,
               const Site& site = Site::current());
void bulk_copy_cluster(uint32_t to,
                       uint32_t from,
                       uint32_t bytes,
                       uint32_t barrier,
                       const Site& site = Site::current());
void bulk_store(void* to, uint32_t from, uint32_t bytes, const Site& site = Site::current());
void tensor_load(uint32_t to,
                 const TensorMap* map,
                 uint32_t barrier,
                 TensorPosition at,
                 const Site& site = Site::current());
void tensor_load_multicast(uint32_t to,
                           const TensorMap* map,
                           uint32_t barrier,
                           TensorPosition at,
                           uint16_t blocks,
                           const Site& site = Site::current());
void tensor_store(const TensorMap* map,
                  uint32_t from,
                  TensorPosition at,
                  uint32_t bytes = 8192,
                  const Site& site = Site::current());
void bulk_commit(const Site& site = Site::current());
void wait_for_stores(uint32_t pending, bool reads_only, const Site& site);
template <int Pending>
void bulk_wait(const Site& site = Site::current()) {
    wait_for_stores(Pending, false, site);
}
template <int Pending>
void bulk_wait_read(const Site& site = Site::current()) {
    wait_for_stores(Pending, true, site);
}

}  // namespace hybridcp::device
