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
