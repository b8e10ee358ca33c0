#pragma once

// Products of a warpgroup: d (64 x N, fp32 in registers) += A (64 x 16) B (16 x N), both of bf16 or
// (names with _f16) both of fp16. Warp w of the warpgroup has rows 16 w to 16 w + 15 of A and d,
// laid out as in mma_bf16: d[4 j ..] are columns 8 j to 8 j + 7. They run asynchronously: a fence
// before the first, a commit after the last, and until the wait neither d nor A's registers may be
// touched, nor the operands in shared memory be overwritten.

#include "kernels/cuda/device/racecheck.cuh"

namespace hybridcp::device {

/// Orders earlier accesses of this warpgroup's registers before the products that follow.
HCP_DEVICE void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
HCP_DEVICE void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `Pending` committed groups are incomplete.
template <int Pending>
HCP_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// Keeps the compiler from moving accesses of registers that a product in flight uses across this
/// place.
template <int Count>
HCP_DEVICE void keep_registers(float (&registers)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        asm volatile("" : "+f"(registers[i])::"memory");
    }
}
template <int Count>
HCP_DEVICE void keep_registers(uint32_t (&registers)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        asm volatile("" : "+r"(registers[i])::"memory");
    }
}

// clang-format off
#define HCP_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define HCP_D16(i) HCP_D8(i), HCP_D8(i + 8)
#define HCP_D32(i) HCP_D16(i), HCP_D16(i + 16)
#define HCP_D64(i) HCP_D32(i), HCP_D32(i + 32)
#define HCP_LIST16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define HCP_LIST32 HCP_LIST16 \
    ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define HCP_LIST64 HCP_LIST32 \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
    ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

#define HCP_WGMMA(suffix, type, n, half, a0, a1, a2, a3, b, accumulate, major) \
    template <Major MajorB> \
    HCP_DEVICE void wgmma_registers##suffix(float (&d)[half], const uint32_t (&a)[4], uint64_t b_tile, \
                                    bool add) { \
        touch_operand<MajorB, 2 * half>(b_tile); \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" accumulate ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" HCP_LIST##half \
                     "}, {%" a0 ",%" a1 ",%" a2 ",%" a3 "}, %" b ", p, 1, 1, %" major ";\n}" \
                     : HCP_D##half(0) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), \
                       "r"(static_cast<uint32_t>(add)), "n"(static_cast<int>(MajorB))); \
    } \
    template <Major MajorA, Major MajorB> \
    HCP_DEVICE void wgmma_shared##suffix(float (&d)[half], uint64_t a_tile, uint64_t b_tile, bool add) { \
        touch_operand<MajorA, 64>(a_tile); \
        touch_operand<MajorB, 2 * half>(b_tile); \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" a2 ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" HCP_LIST##half \
                     "}, %" a0 ", %" a1 ", p, 1, 1, %" a3 ", %" b ";\n}" \
                     : HCP_D##half(0) \
                     : "l"(a_tile), "l"(b_tile), "r"(static_cast<uint32_t>(add)), \
                       "n"(static_cast<int>(MajorA)), "n"(static_cast<int>(MajorB))); \
    }
/// A from registers, or both operands from shared memory; tiles are descriptors (descriptor.cuh). N is twice the
/// length of d: 32, 64 or 128. `add` false: d = A B.
HCP_WGMMA(, "bf16", "32", 16, "16", "17", "18", "19", "20", "21", "22")
HCP_WGMMA(, "bf16", "64", 32, "32", "33", "34", "35", "36", "37", "38")
HCP_WGMMA(, "bf16", "128", 64, "64", "65", "66", "67", "68", "69", "70")
HCP_WGMMA(_f16, "f16", "32", 16, "16", "17", "18", "19", "20", "21", "22")
HCP_WGMMA(_f16, "f16", "64", 32, "32", "33", "34", "35", "36", "37", "38")
HCP_WGMMA(_f16, "f16", "128", 64, "64", "65", "66", "67", "68", "69", "70")

#undef HCP_WGMMA
#undef HCP_LIST16
#undef HCP_LIST32
#undef HCP_LIST64
#undef HCP_D8
#undef HCP_D16
#undef HCP_D32
#undef HCP_D64
// clang-format on

}  // namespace hybridcp::device
