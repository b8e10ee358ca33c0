#pragma once

// Powers of two between numbers as they are and as fp16 operands hold them (docs/gdn-cuda.md,
// "Powers of two").

#include "kernels/gdn/cuda/operands.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

/// The largest magnitude of numbers, in bits; infinities and NaN do not count.
struct Largest {
    uint32_t bits = 0;

    HCP_DEVICE void add(float x) {
        constexpr uint32_t kInfinity = 0x7f800000;
        const uint32_t magnitude = device::bits_of(x) & 0x7fffffffU;
        bits = magnitude < kInfinity && magnitude > bits ? magnitude : bits;
    }
    /// Of groups of so many neighbouring lanes.
    [[nodiscard]] HCP_DEVICE uint32_t of_lanes(uint32_t lanes) const {
        uint32_t all = bits;
        for (uint32_t distance = 1; distance < lanes; distance <<= 1) {
            const uint32_t other = device::shuffle_xor(all, distance);
            all = other > all ? other : all;
        }
        return all;
    }
};

/// Of a value head, from the bits of its largest magnitude, which 2^-exponent brings below 2^-3. In
/// both directions a normal number, in bf16 too.
HCP_DEVICE int exponent_of(uint32_t largest) {
    constexpr int kRoom = 3, kMost = 120;
    const int exponent = static_cast<int>(largest >> 23) - 126 + kRoom;
    return largest == 0 ? 0 : exponent < -kMost ? -kMost : exponent > kMost ? kMost : exponent;
}
/// 0 for operands in bf16, which have no powers.
HCP_DEVICE int exponent_of_head(const uint32_t* largest) {
    if constexpr (kFp16) {
        return exponent_of(device::load_global(largest));
    }
    return 0;
}
/// 2^exponent, for -126 to 127; 2^-126 below, 2^127 above.
HCP_DEVICE float power_of_two_within(int exponent) {
    const int within = exponent < -126 ? -126 : exponent > 127 ? 127 : exponent;
    return device::float_of(static_cast<uint32_t>(within + 127) << 23);
}
/// A power of two as pair of bf16.
HCP_DEVICE uint32_t bf16_pair(float power) {
    const uint32_t high = device::bits_of(power) & 0xffff0000U;
    return high | high >> 16;
}

/// Rows of K and Q are operands times the power of two in their factor r (rsqrt(|x|^2 + epsilon), 1
/// without normalisation), which leaves a number in [1, 2) of it. 0, of rows beyond the chunk and
/// of those whose square overflows, has the power 0.
HCP_DEVICE float power_in(float r) {
    return device::float_of(device::bits_of(r) & 0x7f800000U);
}
/// Operands in bf16 are the rows themselves, and r is their factor.
HCP_DEVICE float rest_of(float r) {
    return kFp16 ? device::float_of((device::bits_of(r) & 0x7fffffU) | 0x3f800000U) : r;
}

/// A pair of bf16 times one of powers of two, in fp16.
HCP_DEVICE uint32_t to_f16(uint32_t pair, uint32_t powers) {
    const device::Float2 x = device::unpack_bf16(device::multiply_bf16(pair, powers));
    return device::pack_f16(x.x, x.y);
}
HCP_DEVICE device::Word4 to_f16(device::Word4 pairs, uint32_t powers) {
    return {to_f16(pairs.x, powers), to_f16(pairs.y, powers), to_f16(pairs.z, powers),
            to_f16(pairs.w, powers)};
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
