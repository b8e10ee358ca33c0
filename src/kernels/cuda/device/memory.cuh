#pragma once

// Typed loads and stores of 2, 4, 8 or 16 bytes, aligned to their size.

#include <cstring>

#include "kernels/cuda/device/types.cuh"

namespace hybridcp::device {

/// Address of the dynamic shared memory of this block; a multiple of 1,024.
HCP_DEVICE uint32_t shared_base() {
    extern __shared__ __align__(1024) unsigned char hcp_dynamic_shared[];
    return static_cast<uint32_t>(__cvta_generic_to_shared(hcp_dynamic_shared));
}

#define HCP_SHARED_ACCESS(space)                                                           \
    if constexpr (sizeof(T) == 2) {                                                        \
        uint16_t bits;                                                                     \
        asm volatile("ld." space ".b16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory"); \
        std::memcpy(&value, &bits, 2);                                                     \
    } else if constexpr (sizeof(T) == 4) {                                                 \
        uint32_t bits;                                                                     \
        asm volatile("ld." space ".b32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory"); \
        std::memcpy(&value, &bits, 4);                                                     \
    } else if constexpr (sizeof(T) == 8) {                                                 \
        Word2 bits;                                                                        \
        asm volatile("ld." space ".v2.b32 {%0,%1}, [%2];"                                  \
                     : "=r"(bits.x), "=r"(bits.y)                                          \
                     : "r"(address)                                                        \
                     : "memory");                                                          \
        std::memcpy(&value, &bits, 8);                                                     \
    } else {                                                                               \
        static_assert(sizeof(T) == 16);                                                    \
        Word4 bits;                                                                        \
        asm volatile("ld." space ".v4.b32 {%0,%1,%2,%3}, [%4];"                            \
                     : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)              \
                     : "r"(address)                                                        \
                     : "memory");                                                          \
        std::memcpy(&value, &bits, 16);                                                    \
    }

#define HCP_SHARED_STORE(space)                                                                    \
    if constexpr (sizeof(T) == 2) {                                                                \
        uint16_t bits;                                                                             \
        std::memcpy(&bits, &value, 2);                                                             \
        asm volatile("st." space ".b16 [%0], %1;" ::"r"(address), "h"(bits) : "memory");           \
    } else if constexpr (sizeof(T) == 4) {                                                         \
        uint32_t bits;                                                                             \
        std::memcpy(&bits, &value, 4);                                                             \
        asm volatile("st." space ".b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");           \
    } else if constexpr (sizeof(T) == 8) {                                                         \
        Word2 bits;                                                                                \
        std::memcpy(&bits, &value, 8);                                                             \
        asm volatile("st." space ".v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(bits.x), "r"(bits.y) \
                     : "memory");                                                                  \
    } else {                                                                                       \
        static_assert(sizeof(T) == 16);                                                            \
        Word4 bits;                                                                                \
        std::memcpy(&bits, &value, 16);                                                            \
        asm volatile("st." space ".v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(bits.x),       \
                     "r"(bits.y), "r"(bits.z), "r"(bits.w)                                         \
                     : "memory");                                                                  \
    }

template <class T>
HCP_DEVICE T load_shared(uint32_t address) {
    T value;
    HCP_SHARED_ACCESS("shared::cta")
    return value;
}
template <class T>
HCP_DEVICE void store_shared(uint32_t address, T value) {
    HCP_SHARED_STORE("shared::cta")
}

/// Shared memory of any block of the cluster; the address comes from map_shared.
template <class T>
HCP_DEVICE T load_cluster(uint32_t address) {
    T value;
    HCP_SHARED_ACCESS("shared::cluster")
    return value;
}
template <class T>
HCP_DEVICE void store_cluster(uint32_t address, T value){HCP_SHARED_STORE("shared::cluster")}

/// Stores asynchronously: completes 16 bytes on `barrier`, which lies in the same block as `to`.
/// Both addresses come from map_shared. Who waits for the barrier sees the value without a fence.
HCP_DEVICE void store_cluster_async(uint32_t to, Float4 value, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, "
        "[%5];" ::"r"(to),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
        : "memory");
}

#undef HCP_SHARED_ACCESS
#undef HCP_SHARED_STORE

template <class T>
HCP_DEVICE T load_global(const T* address) {
    return *address;
}
/// Brings the 32 bytes around `address` into the L2 cache.
HCP_DEVICE void prefetch_global(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}
template <class T>
HCP_DEVICE void store_global(T* address, T value) {
    *address = value;
}
HCP_DEVICE void atomic_max_global(uint32_t* address, uint32_t value) {
    atomicMax(address, value);
}
/// Returns what was there.
HCP_DEVICE uint32_t atomic_add_global(uint32_t* address, uint32_t value) {
    return atomicAdd(address, value);
}
/// After this thread's stores, for who sees the sum by load_acquire_global, in any kernel.
HCP_DEVICE void release_add_global(uint32_t* address, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
HCP_DEVICE uint32_t load_acquire_global(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

}  // namespace hybridcp::device
