#pragma once

// With HCP_RACECHECK the kernels are such that compute-sanitizer's racecheck can judge them: it
// follows ordinary loads and stores, what TMA loads, and mbarriers at which every lane arrives
// (docs/gdn-cuda.md, "Racecheck"). So all lanes arrive (arrivals.cuh), matrices are moved by
// ordinary instructions (fragments.cuh), and what products and copies read is loaded before.

#include "kernels/cuda/device/descriptor.cuh"
#ifdef __CUDACC__
#include "kernels/cuda/device/memory.cuh"
#include "kernels/cuda/device/threads.cuh"
#endif

namespace hybridcp::device {

#ifdef HCP_RACECHECK
constexpr bool kRacecheck = true;
#else
constexpr bool kRacecheck = false;
#endif

#ifdef __CUDACC__
/// The addresses of the two elements of matrix `i` that this lane has of a transposed one; of
/// others the first is that of both.
struct PairPlace {
    uint32_t first, second;
};
template <bool kTransposed>
HCP_DEVICE PairPlace pair_place(uint32_t row_address, uint32_t i) {
    const uint32_t group = lane_index() / 4, pair = lane_index() % 4;
    if constexpr (kTransposed) {
        return {shuffle(row_address, 8 * i + 2 * pair) + 2 * group,
                shuffle(row_address, 8 * i + 2 * pair + 1) + 2 * group};
    } else {
        return {shuffle(row_address, 8 * i + group) + 4 * pair, 0};
    }
}
/// load_matrix and store_matrix by ordinary instructions.
template <bool kTransposed, int Count>
HCP_DEVICE void load_by_elements(uint32_t (&to)[Count], uint32_t row_address) {
    for (int i = 0; i < Count; ++i) {
        const PairPlace at = pair_place<kTransposed>(row_address, i);
        if constexpr (kTransposed) {
            to[i] = load_shared<uint16_t>(at.first) |
                    static_cast<uint32_t>(load_shared<uint16_t>(at.second)) << 16;
        } else {
            to[i] = load_shared<uint32_t>(at.first);
        }
    }
}
template <bool kTransposed, int Count>
HCP_DEVICE void store_by_elements(uint32_t row_address, const uint32_t (&from)[Count]) {
    for (int i = 0; i < Count; ++i) {
        const PairPlace at = pair_place<kTransposed>(row_address, i);
        if constexpr (kTransposed) {
            store_shared(at.first, static_cast<uint16_t>(from[i]));
            store_shared(at.second, static_cast<uint16_t>(from[i] >> 16));
        } else {
            store_shared(at.first, from[i]);
        }
    }
}

/// A load that stays though nobody uses it.
HCP_DEVICE void touch(uint32_t address) {
    asm volatile(
        "{\n.reg .b32 a, b, c, d;\nld.volatile.shared::cta.v4.b32 {a, b, c, d}, [%0];\n}" ::"r"(
            address)
        : "memory");
}
/// Loads what a copy of shared memory will read; by the thread that issues it.
HCP_DEVICE void touch_source(uint32_t from, uint32_t bytes) {
    if constexpr (kRacecheck) {
#pragma unroll 1
        for (uint32_t at = 0; at < bytes; at += 16) {
            touch(from + at);
        }
    }
}
/// Loads an operand of a product: 16 in K times `Others`. By the warpgroup.
template <Major kMajor, uint32_t Others>
HCP_DEVICE void touch_operand(uint64_t descriptor) {
    if constexpr (kRacecheck) {
        const auto field = [descriptor](int first) {
            return static_cast<uint32_t>(descriptor >> first & 0x3fff) << 4;
        };
        const uint32_t own = shared_base() & ~0x3ffffU, thread = threadIdx.x % 128;
        const uint32_t tile = own | field(0), leading = field(16), stride = field(32);
        // Rows of 128 bytes: of K-major ones 32 bytes, of others 64 columns.
        constexpr bool kWhole = kMajor == Major::kMn;
        constexpr uint32_t kPieces = !kWhole ? 2 : Others < 64 ? Others / 8 : 8;
        constexpr uint32_t kRows = kWhole ? 16 : Others;
        for (uint32_t i = thread; i < kRows * kPieces; i += 128) {
            const uint32_t row = i / kPieces, piece = i % kPieces;
            const uint32_t at = tile + row / 8 * stride + row % 8 * 128 + 16 * piece;
            for (uint32_t column = 0; column < (kWhole ? Others : 64); column += 64) {
                touch(swizzle_128(at + column / 64 * leading));
            }
        }
    }
}
#endif

}  // namespace hybridcp::device
