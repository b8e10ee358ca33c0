#include "kernels/simd/peak_kernels.h"

#include "kernels/simd/vector.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace hybridcp::HCP_ISA {
namespace {

// Enough independent sums to hide the latency of a multiply-add (4 to 6 cycles, two a cycle), and
// registers left for the operands.
// All loops over them are unrolled, or the compiler would keep them in memory.
constexpr int kSums = HCP_VECTOR_BYTES == 64 ? 24 : 12;

template <typename T>
HCP_INLINE void keep_in_register(T& x) {
#if defined(__x86_64__) && defined(__AVX512F__)
    asm volatile("" : "+v"(x));
#elif defined(__x86_64__)
    asm volatile("" : "+x"(x));
#else
    asm volatile("" : "+w"(x));
#endif
}

std::int64_t peak_fp32(std::int64_t rounds, float* sink) {
    Vec sums[kSums];
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) {
        sums[i] = broadcast(1.0F + static_cast<float>(i));
    }
    Vec factor = broadcast(0.999F), addend = broadcast(0.001F);
    keep_in_register(factor);
    keep_in_register(addend);
    for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < kSums; ++i) {
            sums[i] = sums[i] * factor + addend;
            keep_in_register(sums[i]);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) {
        *sink += sum_lanes(sums[i]);
    }
    return rounds * kSums * kLanes * 2;
}

#if defined(__AMX_BF16__)

struct alignas(64) TileConfig {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// Tiles of 16 rows of 64 bytes: six sums, each (16 x 32) times (32 x 16).
std::int64_t peak_bf16(std::int64_t rounds, float* sink) {
    const TileConfig config;
    _tile_loadconfig(&config);
    alignas(64) static const std::uint16_t kOperand[16 * 32] = {0x3f80};  // one 1, else 0
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_loadd(6, kOperand, 64);
    _tile_loadd(7, kOperand, 64);
    for (std::int64_t round = 0; round < rounds; ++round) {
        _tile_dpbf16ps(0, 6, 7);
        _tile_dpbf16ps(1, 6, 7);
        _tile_dpbf16ps(2, 6, 7);
        _tile_dpbf16ps(3, 6, 7);
        _tile_dpbf16ps(4, 6, 7);
        _tile_dpbf16ps(5, 6, 7);
    }
    alignas(64) float result[16 * 16];
    const auto add_result = [&] { *sink += result[0]; };
    _tile_stored(0, result, 64);
    add_result();
    _tile_stored(1, result, 64);
    add_result();
    _tile_stored(2, result, 64);
    add_result();
    _tile_stored(3, result, 64);
    add_result();
    _tile_stored(4, result, 64);
    add_result();
    _tile_stored(5, result, 64);
    add_result();
    _tile_release();
    return rounds * 6 * 16 * 16 * 32 * 2;
}

#elif defined(__AVX512BF16__)

std::int64_t peak_bf16(std::int64_t rounds, float* sink) {
    Vec sums[kSums] = {};
    // 0x3c00 is 2^-7 in bf16.
    auto left = std::bit_cast<__m512bh>(broadcast_int(0x3c003c00));
    auto right = std::bit_cast<__m512bh>(broadcast_int(0x3c003c00));
    keep_in_register(left);
    keep_in_register(right);
    for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < kSums; ++i) {
            sums[i] =
                std::bit_cast<Vec>(_mm512_dpbf16_ps(std::bit_cast<__m512>(sums[i]), left, right));
            keep_in_register(sums[i]);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) {
        *sink += sum_lanes(sums[i]);
    }
    return rounds * kSums * kLanes * 4;
}

#endif

}  // namespace

const PeakKernels& peak_kernels() {
#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
    static constexpr PeakKernels kKernels{.fp32 = peak_fp32, .bf16 = peak_bf16};
#else
    static constexpr PeakKernels kKernels{.fp32 = peak_fp32, .bf16 = nullptr};
#endif
    return kKernels;
}

}  // namespace hybridcp::HCP_ISA
