#pragma once

// As src/kernels/cuda/device/fragments.cuh and wgmma.cuh.

#include "simt/device_threads.h"

namespace hybridcp::device {

void load_matrices(
    uint32_t* to, uint32_t count, bool transposed, uint32_t address, const Site& site);
void store_matrices(
    const uint32_t* from, uint32_t count, bool transposed, uint32_t address, const Site& site);

template <int Count>
void load_matrix(uint32_t (&to)[Count], uint32_t address, const Site& site = Site::current()) {
    load_matrices(to, Count, false, address, site);
}
template <int Count>
void load_matrix_transposed(uint32_t (&to)[Count],
                            uint32_t address,
                            const Site& site = Site::current()) {
    load_matrices(to, Count, true, address, site);
}
template <int Count>
void store_matrix(uint32_t address,
                  const uint32_t (&from)[Count],
                  const Site& site = Site::current()) {
    store_matrices(from, Count, false, address, site);
}
template <int Count>
void store_matrix_transposed(uint32_t address,
                             const uint32_t (&from)[Count],
                             const Site& site = Site::current()) {
    store_matrices(from, Count, true, address, site);
}
uint32_t transpose_matrix(uint32_t from, const Site& site = Site::current());
void mma_bf16(float (&d)[4],
              const uint32_t (&a)[4],
              const uint32_t (&b)[2],
              const Site& site = Site::current());
void mma_f16(float (&d)[4],
             const uint32_t (&a)[4],
             const uint32_t (&b)[2],
             const Site& site = Site::current());

void wgmma_fence(const Site& site = Site::current());
void wgmma_commit(const Site& site = Site::current());
void wait_for_products(uint32_t pending, const Site& site);
template <int Pending>
void wgmma_wait(const Site& site = Site::current()) {
    wait_for_products(Pending, site);
}

/// What a lane hands to a product; `a` is null when A lies in shared memory.
struct ProductOperands {
    float* d;
    uint32_t columns;
    const uint32_t* a;
    uint64_t a_tile;
    uint64_t b_tile;
    Major a_major;
    Major b_major;
    bool add;
    bool f16 = false;  // A and B; else bf16
};
void start_product(ProductOperands operands, const Site& site);

template <Major MajorB, int Half>
void wgmma_registers(float (&d)[Half],
                     const uint32_t (&a)[4],
                     uint64_t b_tile,
                     bool add,
                     const Site& site = Site::current()) {
    static_assert(Half == 16 || Half == 32 || Half == 64);
    start_product({d, 2 * Half, a, 0, b_tile, Major::kK, MajorB, add}, site);
}
template <Major MajorA, Major MajorB, int Half>
void wgmma_shared(float (&d)[Half],
                  uint64_t a_tile,
                  uint64_t b_tile,
                  bool add,
                  const Site& site = Site::current()) {
    static_assert(Half == 16 || Half == 32 || Half == 64);
    start_product({d, 2 * Half, nullptr, a_tile, b_tile, MajorA, MajorB, add}, site);
}
template <Major MajorB, int Half>
void wgmma_registers_f16(float (&d)[Half],
                         const uint32_t (&a)[4],
                         uint64_t b_tile,
                         bool add,
                         const Site& site = Site::current()) {
    static_assert(Half == 16 || Half == 32 || Half == 64);
    start_product({d, 2 * Half, a, 0, b_tile, Major::kK, MajorB, add, true}, site);
}
template <Major MajorA, Major MajorB, int Half>
void wgmma_shared_f16(float (&d)[Half],
                      uint64_t a_tile,
                      uint64_t b_tile,
                      bool add,
                      const Site& site = Site::current()) {
    static_assert(Half == 16 || Half == 32 || Half == 64);
    start_product({d, 2 * Half, nullptr, a_tile, b_tile, MajorA, MajorB, add, true}, site);
}

/// Nothing to do here: g++ knows nothing of registers that change behind its back, and d is passed
/// by address.
template <class T, int Count>
void keep_registers(T (&)[Count]) {}

}  // namespace hybridcp::device
