#pragma once

// 8x8 matrices of 16-bit elements between shared memory and the registers of a warp, and mma.sync.
// A lane of group g = lane / 4 and pair q = lane % 4 holds elements (g, 2q) and (g, 2q + 1) of a
// matrix in one register. All 32 lanes call.

#include "kernels/cuda/device/racecheck.cuh"

namespace hybridcp::device {

/// Loads Count (1, 2 or 4) matrices; lane 8 i + r gives the address of row r of matrix i. The
/// transposed form gives a lane elements (2q, g) and (2q + 1, g).
#define HCP_LOAD_MATRIX(name, form, transposed)                                                  \
    template <int Count>                                                                         \
    HCP_DEVICE void name(uint32_t(&to)[Count], uint32_t row_address) {                           \
        static_assert(Count == 1 || Count == 2 || Count == 4);                                   \
        if constexpr (kRacecheck) {                                                              \
            load_by_elements<transposed>(to, row_address);                                       \
        } else if constexpr (Count == 1) {                                                       \
            asm volatile("ldmatrix.sync.aligned.m8n8.x1" form ".shared.b16 {%0}, [%1];"          \
                         : "=r"(to[0])                                                           \
                         : "r"(row_address)                                                      \
                         : "memory");                                                            \
        } else if constexpr (Count == 2) {                                                       \
            asm volatile("ldmatrix.sync.aligned.m8n8.x2" form ".shared.b16 {%0,%1}, [%2];"       \
                         : "=r"(to[0]), "=r"(to[1])                                              \
                         : "r"(row_address)                                                      \
                         : "memory");                                                            \
        } else {                                                                                 \
            asm volatile("ldmatrix.sync.aligned.m8n8.x4" form ".shared.b16 {%0,%1,%2,%3}, [%4];" \
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])                    \
                         : "r"(row_address)                                                      \
                         : "memory");                                                            \
        }                                                                                        \
    }
HCP_LOAD_MATRIX(load_matrix, "", false)
HCP_LOAD_MATRIX(load_matrix_transposed, ".trans", true)
#undef HCP_LOAD_MATRIX

/// The reverse of the loads.
#define HCP_STORE_MATRIX(name, form, transposed)                                \
    template <int Count>                                                        \
    HCP_DEVICE void name(uint32_t row_address, const uint32_t(&from)[Count]) {  \
        static_assert(Count == 1 || Count == 2 || Count == 4);                  \
        if constexpr (kRacecheck) {                                             \
            store_by_elements<transposed>(row_address, from);                   \
        } else if constexpr (Count == 1) {                                      \
            asm volatile("stmatrix.sync.aligned.m8n8.x1" form                   \
                         ".shared.b16 [%0], {%1};" ::"r"(row_address),          \
                         "r"(from[0])                                           \
                         : "memory");                                           \
        } else if constexpr (Count == 2) {                                      \
            asm volatile("stmatrix.sync.aligned.m8n8.x2" form                   \
                         ".shared.b16 [%0], {%1,%2};" ::"r"(row_address),       \
                         "r"(from[0]), "r"(from[1])                             \
                         : "memory");                                           \
        } else {                                                                \
            asm volatile("stmatrix.sync.aligned.m8n8.x4" form                   \
                         ".shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row_address), \
                         "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) \
                         : "memory");                                           \
        }                                                                       \
    }
HCP_STORE_MATRIX(store_matrix, "", false)
HCP_STORE_MATRIX(store_matrix_transposed, ".trans", true)
#undef HCP_STORE_MATRIX

/// The transposed 8x8 matrix, in registers.
HCP_DEVICE uint32_t transpose_matrix(uint32_t from) {
    uint32_t to;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(from));
    return to;
}

/// d += A B with A 16x16 and B 16x8, sums in fp32. A: rows g and g + 8, columns 2q.. then 8 + 2q..;
/// B: k = 2q.. and 8 + 2q.., column g; d: (g, 2q..), (g + 8, 2q..).
#define HCP_MMA(name, type)                                                               \
    HCP_DEVICE void name(float(&d)[4], const uint32_t(&a)[4], const uint32_t(&b)[2]) {    \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type               \
                     ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"         \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])); \
    }
HCP_MMA(mma_bf16, "bf16")
HCP_MMA(mma_f16, "f16")
#undef HCP_MMA

}  // namespace hybridcp::device
