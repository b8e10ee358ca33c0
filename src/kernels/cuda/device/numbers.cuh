#pragma once

// Pairs of 16-bit floats in a word, the first in the low half, and fast exponentials.

#include <cuda_fp16.h>

#include "kernels/cuda/device/types.cuh"

namespace hybridcp::device {

/// Rounded to nearest even.
HCP_DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
HCP_DEVICE uint32_t pack_f16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
HCP_DEVICE Float2 unpack_bf16(uint32_t packed) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000U)};
}
HCP_DEVICE Float2 unpack_f16(uint32_t packed) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&packed));
    return {pair.x, pair.y};
}
/// Products of two pairs.
HCP_DEVICE uint32_t multiply_bf16(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
/// The larger of two magnitudes, of each half, with any sign; a NaN only if both are.
HCP_DEVICE uint32_t larger_bf16(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

HCP_DEVICE uint32_t bits_of(float x) {
    return __float_as_uint(x);
}
HCP_DEVICE float float_of(uint32_t bits) {
    return __uint_as_float(bits);
}

/// 2^x with a relative error of about 2^-22; results below 2^-126 are 0.
HCP_DEVICE float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/// 1 / sqrt(x) with a relative error of about 2^-22.
HCP_DEVICE float rsqrt_approximate(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/// 1 / x with a relative error of about 2^-23.
HCP_DEVICE float reciprocal_approximate(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace hybridcp::device
