#pragma once

// Tiles in shared memory with the 128-byte swizzle, as TMA writes them and wgmma reads them: rows
// of 128 bytes, 8 rows an atom of 1,024 bytes, and the 16-byte piece p of row r at place p ^ (r %
// 8). Tiles start at multiples of 1,024 bytes, so the swizzle is a function of the address alone
// (PTX ISA, "Swizzling modes").

#include "kernels/cuda/device/types.cuh"

namespace hybridcp::device {

/// Where a byte of an unswizzled tile lies.
HCP_DEVICE constexpr uint32_t swizzle_128(uint32_t address) {
    return address ^ (((address >> 7) & 7) << 4);
}

/// Descriptor of a wgmma operand with the 128-byte swizzle.
/// K-major: `stride_bytes` from 8 rows to the next 8; a step of 16 in K adds 32 bytes to the
/// address. MN-major: `leading_bytes` from 64 columns to the next 64, `stride_bytes` from 8 k to
/// the next 8.
HCP_DEVICE constexpr uint64_t matrix_descriptor(uint32_t address,
                                                uint32_t leading_bytes,
                                                uint32_t stride_bytes) {
    constexpr uint64_t kSwizzle128 = 1ULL << 62;
    return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{leading_bytes >> 4} << 16 |
           uint64_t{stride_bytes >> 4} << 32 | kSwizzle128;
}

/// The descriptor `bytes` further on; a multiple of 16.
HCP_DEVICE constexpr uint64_t advance(uint64_t descriptor, uint32_t bytes) {
    return descriptor + (bytes >> 4);
}

}  // namespace hybridcp::device
