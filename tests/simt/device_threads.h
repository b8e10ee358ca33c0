#pragma once

// As src/kernels/cuda/device/threads.cuh and numbers.cuh.

#include <bit>
#include <cmath>
#include <cstdint>
#include <source_location>

#include "kernels/cuda/device/types.cuh"
#include "simt/half.h"

namespace hybridcp::device {

using Site = std::source_location;

uint32_t thread_index();
uint32_t block_threads();
uint32_t block_index();
uint32_t block_index_y();
uint32_t grid_blocks();
uint32_t cluster_rank();
inline uint32_t lane_index() {
    return thread_index() & 31;
}
inline uint32_t warp_index() {
    return thread_index() >> 5;
}

/// The word of the lane that `source` of (lane, argument) names, or this lane's own if there is
/// none.
enum class Shuffle { kXor, kUp, kDown, kIndex };
uint32_t shuffle_word(Shuffle kind, uint32_t value, uint32_t argument, const Site& site);

template <class T>
T shuffle_xor(T value, uint32_t mask, const Site& site = Site::current()) {
    const auto word = std::bit_cast<uint32_t>(value);
    return std::bit_cast<T>(shuffle_word(Shuffle::kXor, word, mask, site));
}
template <class T>
T shuffle_up(T value, uint32_t distance, const Site& site = Site::current()) {
    const auto word = std::bit_cast<uint32_t>(value);
    return std::bit_cast<T>(shuffle_word(Shuffle::kUp, word, distance, site));
}
template <class T>
T shuffle_down(T value, uint32_t distance, const Site& site = Site::current()) {
    const auto word = std::bit_cast<uint32_t>(value);
    return std::bit_cast<T>(shuffle_word(Shuffle::kDown, word, distance, site));
}
template <class T>
T shuffle(T value, uint32_t lane, const Site& site = Site::current()) {
    const auto word = std::bit_cast<uint32_t>(value);
    return std::bit_cast<T>(shuffle_word(Shuffle::kIndex, word, lane, site));
}

void set_registers(int count, const Site& site);
template <int Count>
void increase_registers(const Site& site = Site::current()) {
    static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
    set_registers(Count, site);
}
template <int Count>
void decrease_registers(const Site& site = Site::current()) {
    static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
    set_registers(Count, site);
}

void sleep_ns(uint32_t duration_ns, const Site& site = Site::current());
/// Counts turns of the scheduler: it only grows.
uint64_t clock_cycles();

inline uint32_t pack_bf16(float low, float high) {
    return simt::bf16_bits(low) | uint32_t{simt::bf16_bits(high)} << 16;
}
inline uint32_t pack_f16(float low, float high) {
    return simt::f16_bits(low) | uint32_t{simt::f16_bits(high)} << 16;
}
inline Float2 unpack_bf16(uint32_t packed) {
    return {simt::bf16_value(static_cast<uint16_t>(packed)),
            simt::bf16_value(static_cast<uint16_t>(packed >> 16))};
}
inline Float2 unpack_f16(uint32_t packed) {
    return {simt::f16_value(static_cast<uint16_t>(packed)),
            simt::f16_value(static_cast<uint16_t>(packed >> 16))};
}
uint32_t multiply_bf16(uint32_t a, uint32_t b);
uint32_t larger_bf16(uint32_t a, uint32_t b);
inline uint32_t bits_of(float x) {
    return std::bit_cast<uint32_t>(x);
}
inline float float_of(uint32_t bits) {
    return std::bit_cast<float>(bits);
}
inline float exp2_approximate(float x) {
    const float y = std::exp2(x);
    return y < 0x1p-126F ? 0.0F : y;
}
inline float rsqrt_approximate(float x) {
    return 1.0F / std::sqrt(x);
}
inline float reciprocal_approximate(float x) {
    return 1.0F / x;
}

}  // namespace hybridcp::device
