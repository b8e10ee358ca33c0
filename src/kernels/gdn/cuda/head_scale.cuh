#pragma once

// Powers of two between numbers as they are and as fp16 operands hold them (docs/gdn-cuda.md,
// "Operands").

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

/// Of a value head, from the bits of its largest magnitude, which 2^-exponent brings below 2^room.
/// In both directions a normal number, in bf16 too.
HCP_DEVICE int exponent_of(uint32_t largest, int room) {
    constexpr int kMost = 120;
    const int exponent = static_cast<int>(largest >> 23) - 126 - room;
    return largest == 0 ? 0 : exponent < -kMost ? -kMost : exponent > kMost ? kMost : exponent;
}
/// Of v and start states: R of 2,048 tokens without decay grows to 2^13 times |v| at most (beta 2,
/// one key, v of changing sign), and fp16 ends at 2^16.
constexpr int kRoomOfValues = 2;
/// Of dO and end states' gradients: dR grows as far, times scale and |q|; without normalisation |q|
/// is taken for sqrt(128).
HCP_DEVICE int room_of_gradients(float scale, bool use_qk_l2norm) {
    const uint32_t bits = device::bits_of(16.0F * scale) & 0x7fffffffU;
    const int growth = static_cast<int>(bits >> 23) - 127;  // 0: of scale 1 / sqrt(128)
    const int room = (use_qk_l2norm ? 5 : 2) - (growth > 0 ? growth : 0);
    return room > -3 ? room : -3;
}
/// 0 for operands in bf16, which have no powers.
HCP_DEVICE int exponent_of_values(const uint32_t* largest) {
    if constexpr (kFp16) {
        return exponent_of(device::load_global(largest), kRoomOfValues);
    }
    return 0;
}
HCP_DEVICE int exponent_of_gradients(const uint32_t* largest, const Shape& shape) {
    if constexpr (kFp16) {
        return exponent_of(device::load_global(largest),
                           room_of_gradients(shape.scale, shape.use_qk_l2norm));
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
