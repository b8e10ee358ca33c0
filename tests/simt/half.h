#pragma once

// bf16 and fp16 as bits, rounded to nearest even as the GPU's conversions.

#include <bit>
#include <cmath>
#include <cstdint>

namespace hybridcp::simt {

inline float bf16_value(uint16_t bits) {
    return std::bit_cast<float>(uint32_t{bits} << 16);
}

inline uint16_t bf16_bits(float value) {
    if (std::isnan(value)) {
        return 0x7fff;
    }
    const auto bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float f16_value(uint16_t bits) {
    const uint32_t sign = uint32_t{bits & 0x8000U} << 16;
    const uint32_t exponent = bits >> 10 & 0x1f;
    const uint32_t mantissa = bits & 0x3ff;
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
        return sign != 0 ? -magnitude : magnitude;
    }
    const uint32_t high = exponent == 0x1f ? 0xff : exponent + 112;
    return std::bit_cast<float>(sign | high << 23 | mantissa << 13);
}

inline uint16_t f16_bits(float value) {
    static constexpr float kOverflows = 65520.0F;  // halfway above the largest number, 65,504
    const auto sign = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16 & 0x8000);
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) {
        return 0x7fff;
    }
    if (magnitude >= kOverflows) {
        return sign | 0x7c00;
    }
    if (magnitude < 0x1p-14F) {  // subnormal: the addition rounds to multiples of 2^-24
        const float shifted = magnitude + 0.5F;
        return static_cast<uint16_t>(sign + (std::bit_cast<uint32_t>(shifted) - 0x3f000000U));
    }
    const auto bits = std::bit_cast<uint32_t>(magnitude);
    const uint32_t rounded = bits + 0xfff + (bits >> 13 & 1);
    return static_cast<uint16_t>(sign + ((rounded >> 13) - (112U << 10)));
}

}  // namespace hybridcp::simt
