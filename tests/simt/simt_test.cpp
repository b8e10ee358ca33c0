// Matrix primitives under the emulator against plain loops.

#include <gtest/gtest.h>

#include <limits>

#include "simt/test_kernels.h"

namespace hybridcp::simt {
namespace {

using device::Major;

enum class SourceOfA { kSharedK, kSharedMn, kRegisters };

constexpr uint32_t kTileK = 64;
constexpr uint32_t kTileBytes = 64 * 128;

struct ProductParams {
    TensorMap a, b;
    float* c;  // 64 x N
};

// A step of 16 of d += A B: A as this lane's address for load_matrix, or as a descriptor.
template <Major MajorB, bool F16, int Half>
void multiply_registers(float (&d)[Half], uint32_t a, uint64_t b, bool add) {
    uint32_t fragment[4];
    device::load_matrix(fragment, a);
    if constexpr (F16) {
        device::wgmma_registers_f16<MajorB>(d, fragment, b, add);
    } else {
        device::wgmma_registers<MajorB>(d, fragment, b, add);
    }
}
template <Major MajorA, Major MajorB, bool F16, int Half>
void multiply_shared(float (&d)[Half], uint64_t a, uint64_t b, bool add) {
    if constexpr (F16) {
        device::wgmma_shared_f16<MajorA, MajorB>(d, a, b, add);
    } else {
        device::wgmma_shared<MajorA, MajorB>(d, a, b, add);
    }
}

// C = A B for one warpgroup: A and B come by TMA with the 128-byte swizzle.
template <int N, SourceOfA Source, Major MajorB, bool F16>
void product_kernel(const ProductParams& p) {
    static constexpr Major kMajorA = Source == SourceOfA::kSharedMn ? Major::kMn : Major::kK;
    const uint32_t a = device::shared_base();
    const uint32_t b = a + kTileBytes;
    const uint32_t barrier = b + 2 * kTileBytes;
    if (device::thread_index() == 0) {
        device::mbarrier_init(barrier, 1);
        device::fence_mbarrier_init();
        static constexpr uint32_t kBoxesB = MajorB == Major::kMn && N == 128 ? 2 : 1;
        static constexpr uint32_t kRowsB = MajorB == Major::kMn ? kTileK : N;
        device::mbarrier_arrive_expect(barrier, kTileBytes + kBoxesB * kRowsB * 128);
        device::tensor_load(a, &p.a, barrier, {0, 0, 0});
        for (uint32_t box = 0; box < kBoxesB; ++box) {
            device::tensor_load(b + box * kTileBytes, &p.b, barrier,
                                {static_cast<int32_t>(box * 64), 0, 0});
        }
    }
    device::sync_block();
    device::mbarrier_wait(barrier, 0);
    float d[N / 2] = {};
    const uint64_t tile_a = device::matrix_descriptor(a, kTileBytes, 1024);
    const uint64_t tile_b = device::matrix_descriptor(b, kTileBytes, 1024);
    const uint32_t lane = device::lane_index();
    device::wgmma_fence();
    for (uint32_t k = 0; k < 4; ++k) {
        const uint64_t step_b = device::advance(tile_b, k * (MajorB == Major::kK ? 32 : 2048));
        if constexpr (Source == SourceOfA::kRegisters) {
            const uint32_t row = 16 * device::warp_index() + lane % 16;
            multiply_registers<MajorB, F16>(
                d, device::swizzle_128(a + row * 128 + k * 32 + lane / 16 * 16), step_b, k > 0);
        } else {
            const uint64_t step_a = device::advance(tile_a, k * (kMajorA == Major::kK ? 32 : 2048));
            multiply_shared<kMajorA, MajorB, F16>(d, step_a, step_b, k > 0);
        }
    }
    device::wgmma_commit();
    device::wgmma_wait<0>();
    for (uint32_t i = 0; i < N / 2; ++i) {
        const uint32_t row = 16 * device::warp_index() + lane / 4 + 8 * (i / 2 % 2);
        const uint32_t column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        device::store_global(&p.c[row * N + column], d[i]);
    }
}

template <int N, SourceOfA Source, Major MajorB, bool F16>
void expect_product() {
    const bool a_by_k = Source != SourceOfA::kSharedMn;
    const bool b_by_k = MajorB == Major::kK;
    const Matrix a = Matrix::numbered(64, kTileK);
    const Matrix b = b_by_k ? Matrix::numbered(N, kTileK) : Matrix::numbered(kTileK, N);
    for (uint64_t seed = 0; seed < 3; ++seed) {
        std::vector<float> c(std::size_t{64} * N);
        Matrix a_bits = F16 ? a.in_f16() : a, b_bits = F16 ? b.in_f16() : b;
        const ProductParams params{a_bits.map(64), b_bits.map(b_by_k ? N : 64), c.data()};
        launch({.threads = 128,
                .shared_bytes = 3 * kTileBytes + 16,
                .seed = seed,
                .buffers = {{a_bits.bits.data(), a_bits.bits.size() * 2, false},
                            {b_bits.bits.data(), b_bits.bits.size() * 2, false},
                            {c.data(), c.size() * 4}}},
               [&] { product_kernel<N, Source, MajorB, F16>(params); });
        for (uint32_t row = 0; row < 64; ++row) {
            for (uint32_t column = 0; column < N; ++column) {
                float sum = 0;
                for (uint32_t k = 0; k < kTileK; ++k) {
                    sum += (a_by_k ? a.at(row, k) : a.at(k, row)) *
                           (b_by_k ? b.at(column, k) : b.at(k, column));
                }
                ASSERT_EQ(c[row * N + column], sum) << "row " << row << " column " << column;
            }
        }
    }
}

template <int N, bool F16>
void expect_products() {
    expect_product<N, SourceOfA::kSharedK, Major::kK, F16>();
    expect_product<N, SourceOfA::kSharedK, Major::kMn, F16>();
    expect_product<N, SourceOfA::kSharedMn, Major::kK, F16>();
    expect_product<N, SourceOfA::kSharedMn, Major::kMn, F16>();
    expect_product<N, SourceOfA::kRegisters, Major::kK, F16>();
    expect_product<N, SourceOfA::kRegisters, Major::kMn, F16>();
}

TEST(Wgmma, MatchesTripleLoop) {
    expect_products<32, false>();
    expect_products<64, false>();
    expect_products<128, false>();
    expect_products<32, true>();
    expect_products<64, true>();
    expect_products<128, true>();
}

// A (16 x 16) and B (16 x 8) row by row in shared memory, pitch 48 bytes; the fragment of B comes
// transposed.
template <bool Bf16>
void mma_kernel(float* c) {
    static constexpr uint32_t kPitch = 48;
    const uint32_t a = device::shared_base();
    const uint32_t b = a + 16 * kPitch;
    const uint32_t lane = device::lane_index();
    const auto bits = Bf16 ? bf16_bits : f16_bits;
    for (uint32_t i = lane; i < 256; i += 32) {
        device::store_shared(a + i / 16 * kPitch + i % 16 * 2, bits(small_number(i / 16, i % 16)));
    }
    for (uint32_t i = lane; i < 128; i += 32) {
        device::store_shared(b + i / 8 * kPitch + i % 8 * 2,
                             bits(small_number(i / 8 + 3, i % 8 + 5)));
    }
    device::sync_warp();
    uint32_t fragment_a[4];
    uint32_t fragment_b[2];
    device::load_matrix(fragment_a, a + lane % 16 * kPitch + lane / 16 * 16);
    device::load_matrix_transposed(fragment_b, b + lane % 16 * kPitch);
    float d[4] = {1, 2, 3, 4};
    if constexpr (Bf16) {
        device::mma_bf16(d, fragment_a, fragment_b);
    } else {
        device::mma_f16(d, fragment_a, fragment_b);
    }
    for (uint32_t i = 0; i < 4; ++i) {
        c[(lane / 4 + i / 2 * 8) * 8 + 2 * (lane % 4) + i % 2] = d[i];
    }
}

template <bool Bf16>
void expect_mma() {
    std::vector<float> c(128);
    launch({.shared_bytes = 2048}, [&] { mma_kernel<Bf16>(c.data()); });
    for (uint32_t row = 0; row < 16; ++row) {
        for (uint32_t column = 0; column < 8; ++column) {
            float sum = row < 8 ? 1 : 3;
            sum += static_cast<float>(column % 2);
            for (uint32_t k = 0; k < 16; ++k) {
                sum += small_number(row, k) * small_number(k + 3, column + 5);
            }
            EXPECT_EQ(c[row * 8 + column], sum) << "row " << row << " column " << column;
        }
    }
}

TEST(Mma, MatchesTripleLoop) {
    expect_mma<true>();
    expect_mma<false>();
}

// Four 8x8 matrices one below the other, 16 bytes a row: element (row, column) of all 32 rows is 8
// row + column.
template <int Count>
void matrix_kernel(std::vector<uint32_t>& loaded, std::vector<uint32_t>& transposed) {
    const uint32_t base = device::shared_base();
    const uint32_t copy = base + 512;
    const uint32_t lane = device::lane_index();
    for (uint32_t column = 0; column < 8; ++column) {
        device::store_shared(base + lane * 16 + column * 2,
                             static_cast<uint16_t>(lane * 8 + column));
    }
    device::sync_warp();
    uint32_t words[Count];
    uint32_t turned[Count];
    device::load_matrix(words, base + lane * 16);
    device::store_matrix_transposed(copy + lane * 16, words);
    device::sync_warp();
    device::load_matrix_transposed(turned, copy + lane * 16);
    for (uint32_t i = 0; i < Count; ++i) {
        EXPECT_EQ(turned[i], words[i]);  // twice transposed
    }
    device::sync_warp();
    device::store_matrix(copy + lane * 16, words);
    device::sync_warp();
    device::load_matrix_transposed(turned, copy + lane * 16);
    for (uint32_t i = 0; i < Count; ++i) {
        loaded[i * 32 + lane] = words[i];
        transposed[i * 32 + lane] = turned[i];
        EXPECT_EQ(device::transpose_matrix(words[i]), turned[i]);
    }
}

template <int Count>
void expect_matrices() {
    std::vector<uint32_t> loaded(std::size_t{32} * Count);
    std::vector<uint32_t> transposed(std::size_t{32} * Count);
    launch({.shared_bytes = 1024}, [&] { matrix_kernel<Count>(loaded, transposed); });
    const auto element = [](uint32_t matrix, uint32_t row, uint32_t column) {
        return matrix * 64 + row * 8 + column;
    };
    for (uint32_t i = 0; i < 32 * Count; ++i) {
        const uint32_t g = i % 32 / 4;
        const uint32_t q = i % 4;
        EXPECT_EQ(loaded[i], element(i / 32, g, 2 * q) | element(i / 32, g, 2 * q + 1) << 16);
        EXPECT_EQ(transposed[i], element(i / 32, 2 * q, g) | element(i / 32, 2 * q + 1, g) << 16);
    }
}

TEST(Matrices, LoadStoreAndTranspose) {
    expect_matrices<1>();
    expect_matrices<2>();
    expect_matrices<4>();
}

TEST(Numbers, RoundAsTheConversionsOfTheGpu) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const auto half = static_cast<uint16_t>(bits);
        const float value = f16_value(half);
        if (!std::isnan(value)) {
            ASSERT_EQ(f16_bits(value), half);
        }
        if (!std::isnan(bf16_value(half))) {
            ASSERT_EQ(bf16_bits(bf16_value(half)), half);
        }
    }
    EXPECT_EQ(f16_value(0x3555), 0.333251953125F);
    EXPECT_EQ(f16_bits(1.0F + 0x1p-11F), 0x3c00);  // a tie goes to the even neighbour
    EXPECT_EQ(f16_bits(1.0F + 3 * 0x1p-11F), 0x3c02);
    EXPECT_EQ(f16_bits(65519.0F), 0x7bff);
    EXPECT_EQ(f16_bits(65520.0F), 0x7c00);
    EXPECT_EQ(f16_bits(-0x1p-25F), 0x8000);
    EXPECT_EQ(bf16_bits(1.0F + 0x1p-8F), 0x3f80);
    EXPECT_EQ(bf16_bits(1.0F + 3 * 0x1p-8F), 0x3f82);
    EXPECT_EQ(device::unpack_bf16(device::pack_bf16(1.5F, -2.0F)).y, -2.0F);
    EXPECT_EQ(device::unpack_f16(device::pack_f16(1.5F, -2.0F)).x, 1.5F);
    EXPECT_EQ(device::exp2_approximate(-127.0F), 0.0F);
}

TEST(Numbers, PairsMultiplyAndCompare) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const uint32_t a = device::pack_bf16(3.0F, -0x1p-100F), b = device::pack_bf16(-4.0F, 0x1p-30F);
    EXPECT_EQ(device::multiply_bf16(a, b), device::pack_bf16(-12.0F, -0x1p-130F));
    EXPECT_EQ(device::larger_bf16(a, b), device::pack_bf16(-4.0F, -0x1p-30F));
    EXPECT_EQ(device::larger_bf16(device::pack_bf16(nan, 0.0F), b) & 0x7fff7fff, b & 0x7fff7fff);
}

}  // namespace
}  // namespace hybridcp::simt
