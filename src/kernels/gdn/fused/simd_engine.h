// Small matrix products for the chunk kernels. Operands are seen as units of 32 bits along the
// depth: one fp32, or a pair of bf16. So one loop serves both:
//     C[i, j..] += left[i, u] (broadcast) * right[u, j..]
// The result stays in registers and is handed to an epilogue, two rows at a time, which scales,
// masks, converts and stores.
#pragma once

#include "kernels/gdn/fused/operands.h"

namespace hybridcp::HCP_ISA {

struct Fp32Arithmetic {
    using Element = float;
    static constexpr int kPerUnit = 1;
    static HCP_INLINE Vec multiply_add(Vec sum, VecUint a, VecUint b) {
        return std::bit_cast<Vec>(a) * std::bit_cast<Vec>(b) + sum;
    }
};

struct Bf16Arithmetic {
    using Element = Bf16;
    static constexpr int kPerUnit = 2;
    static HCP_INLINE Vec multiply_add(Vec sum, VecUint a, VecUint b) {
#if defined(__AVX512BF16__)
        return std::bit_cast<Vec>(_mm512_dpbf16_ps(
            std::bit_cast<__m512>(sum), std::bit_cast<__m512bh>(a), std::bit_cast<__m512bh>(b)));
#else
        const auto low = [](VecUint x) { return std::bit_cast<Vec>(x << 16); };
        const auto high = [](VecUint x) { return std::bit_cast<Vec>(x & 0xffff0000U); };
        return high(a) * high(b) + (low(a) * low(b) + sum);
#endif
    }
};

/// Products on vector registers.
template <typename Arithmetic>
struct SimdEngine : Arithmetic {
    static constexpr bool kTiles = false;
    static constexpr int kRows = kLanes == 16 ? 8 : 4;  // of a register block
    static constexpr int kVectors = 2;
    static constexpr int kRowMultiple = 16;  // rows of a product, and lanes of a transpose
    static constexpr int kChunk = 32;
    static constexpr int kRowsAhead = kLanes == 16 ? 2 : 1;  // asked for in each block

    static void begin() {}
    static void end() {}

    /// epilogue(i, j, first, second): columns j .. j + kLanes - 1 of the rows i and i + 1.
    /// `depth(i)` is the range of units that rows i .. i + kRows - 1 need.
    template <typename Depth, typename Epilogue>
    static HCP_INLINE void multiply(const Product& product, Depth depth, Epilogue epilogue) {
        for (int j = 0; j < product.columns; j += kVectors * kLanes) {
            for (int i = 0; i < product.rows; i += kRows) {
                const DepthRange range = depth(i);
                product.ahead.ask_in_block(kRowsAhead,
                                           (range.end - range.begin) * Arithmetic::kPerUnit);
                const int row = product.triangle == 0 ? product.columns : i % product.triangle;
                if (j >= row + kRows) {
                    continue;
                }
                if (j + kLanes >= row + 2 * kRows) {  // twice the rows, half the columns
                    block<2 * kRows, 1>(product, i, j, range, epilogue);
                    i += kRows;
                } else {
                    block<kRows, kVectors>(product, i, j, range, epilogue);
                }
            }
        }
    }

    /// The product to rows at `to`, or with Add that much more.
    template <bool Add = false, typename Depth>
    static HCP_INLINE void multiply_to(const Product& product, Depth depth, float* to, int row) {
        multiply(product, depth, [=](int i, int j, Vec first, Vec second) {
            float *at = to + i * row + j, *next = at + row;
            store(at, Add ? load(at) + first : first);
            store(next, Add ? load(next) + second : second);
        });
    }

  private:
    template <int Rows, int Vectors, typename Epilogue>
    static HCP_INLINE void block(
        const Product& product, int i, int j, DepthRange depth, Epilogue& epilogue) {
        const std::int64_t unit = product.left.unit_stride, row = product.left.row_stride;
        const std::int64_t third = 3 * row;
        const std::int64_t first_row = i, first_column = j;
        Vec sums[Rows][Vectors] = {};
        // A pointer to every fourth row: the others are reached from it without one of their own,
        // of which there would be too few registers.
        const std::uint32_t* fourth[Rows / 4];
#pragma GCC unroll 4
        for (int m = 0; m < Rows; m += 4) {
            fourth[m / 4] = product.left.row(i) + m * row + depth.begin * unit;
        }
        const std::uint32_t* b = product.right.units + (j / kPanel) * product.right.panel_stride +
                                 depth.begin * kPanel + j % kPanel;
        for (int u = depth.begin; u < depth.end; ++u) {
            VecUint columns[Vectors];
#pragma GCC unroll 16
            for (int n = 0; n < Vectors; ++n) {
                columns[n] = load_units(b + n * kLanes);
            }
#pragma GCC unroll 16
            for (int m = 0; m < Rows; ++m) {
                const VecUint left =
                    broadcast_unit(fourth[m / 4] + (m % 4 == 3 ? third : m % 4 * row));
#pragma GCC unroll 16
                for (int n = 0; n < Vectors; ++n) {
                    sums[m][n] = Arithmetic::multiply_add(sums[m][n], left, columns[n]);
                }
            }
#pragma GCC unroll 4
            for (auto& pointer : fourth) {
                pointer += unit;
            }
            b += kPanel;
        }
#pragma GCC unroll 16
        for (int m = 0; m < Rows; m += 2) {
#pragma GCC unroll 16
            for (int n = 0; n < Vectors; ++n) {
                epilogue(ResultIndex{first_row + m}, ResultIndex{first_column + n * kLanes},
                         sums[m][n], sums[m + 1][n]);
            }
        }
    }
};

}  // namespace hybridcp::HCP_ISA
