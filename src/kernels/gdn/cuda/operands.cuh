#pragma once

// The kernels are compiled twice (-DHCP_OPERANDS=bf16 and fp16): with operands of products in bf16,
// which are those of the call or rounded to 8 bits, and in fp16, which have 11 bits but need powers
// of two to stay within its range (docs/gdn-cuda.md, "Operands").

#include "kernels/gdn/cuda/problem.cuh"

namespace hybridcp::gdn::cuda {
namespace bf16 {
constexpr bool kFp16 = false;
}
namespace fp16 {
constexpr bool kFp16 = true;
}

namespace HCP_OPERANDS {

HCP_DEVICE uint32_t pack_operand(float low, float high) {
    return kFp16 ? device::pack_f16(low, high) : device::pack_bf16(low, high);
}
HCP_DEVICE device::Float2 unpack_operand(uint32_t packed) {
    return kFp16 ? device::unpack_f16(packed) : device::unpack_bf16(packed);
}

/// wgmma_registers and wgmma_shared of operands.
template <device::Major MajorB, int Count>
HCP_DEVICE void multiply_registers(float (&d)[Count],
                                   const uint32_t (&a)[4],
                                   uint64_t b_tile,
                                   bool add) {
    if constexpr (kFp16) {
        device::wgmma_registers_f16<MajorB>(d, a, b_tile, add);
    } else {
        device::wgmma_registers<MajorB>(d, a, b_tile, add);
    }
}
template <device::Major MajorA, device::Major MajorB, int Count>
HCP_DEVICE void multiply_shared(float (&d)[Count], uint64_t a_tile, uint64_t b_tile, bool add) {
    if constexpr (kFp16) {
        device::wgmma_shared_f16<MajorA, MajorB>(d, a_tile, b_tile, add);
    } else {
        device::wgmma_shared<MajorA, MajorB>(d, a_tile, b_tile, add);
    }
}

}  // namespace HCP_OPERANDS
}  // namespace hybridcp::gdn::cuda
