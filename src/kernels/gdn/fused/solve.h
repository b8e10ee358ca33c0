// Solves with the unit lower triangular system I + L of a chunk, in fp32.
#pragma once

#include "kernels/simd/vector.h"

namespace hybridcp::HCP_ISA {

inline constexpr int kSolveRows = 4;
inline constexpr int kSolveVectors = 2;

/// x <- (I + L)^-1 x for x [rows, columns] fp32. done(i, c, first, second) gets the solved rows i
/// and i + 1, two vectors each from column c on.
template <typename Done>
HCP_INLINE void solve(
    const float* system, int system_row, float* x, int x_row, int rows, int columns, Done done) {
    for (int c = 0; c < columns; c += kSolveVectors * kLanes) {
        for (int i = 0; i < rows; i += kSolveRows) {
            const float* factors = system + i * system_row;
            Vec sums[kSolveRows][kSolveVectors];
            for (int m = 0; m < kSolveRows; ++m) {
                for (int n = 0; n < kSolveVectors; ++n) {
                    sums[m][n] = load(x + (i + m) * x_row + c + n * kLanes);
                }
            }
            for (int j = 0; j < i; ++j) {
                for (int n = 0; n < kSolveVectors; ++n) {
                    const Vec solved = load(x + j * x_row + c + n * kLanes);
#pragma GCC unroll 4
                    for (int m = 0; m < kSolveRows; ++m) {
                        sums[m][n] -= factors[m * system_row + j] * solved;
                    }
                }
            }
#pragma GCC unroll 4
            for (int m = 0; m < kSolveRows; ++m) {
#pragma GCC unroll 2
                for (int n = 0; n < kSolveVectors; ++n) {
#pragma GCC unroll 4
                    for (int j = 0; j < m; ++j) {
                        sums[m][n] -= factors[m * system_row + i + j] * sums[j][n];
                    }
                    store(x + (i + m) * x_row + c + n * kLanes, sums[m][n]);
                }
            }
#pragma GCC unroll 2
            for (int m = 0; m < kSolveRows; m += 2) {
                done(i + m, c, sums[m], sums[m + 1]);
            }
        }
    }
}

/// x <- (I + L)^-T x; done as above, later rows first.
template <typename Done>
HCP_INLINE void solve_transposed(
    const float* system, int system_row, float* x, int x_row, int rows, int columns, Done done) {
    for (int c = 0; c < columns; c += kSolveVectors * kLanes) {
        for (int i = rows - kSolveRows; i >= 0; i -= kSolveRows) {
            Vec sums[kSolveRows][kSolveVectors];
            for (int m = 0; m < kSolveRows; ++m) {
                for (int n = 0; n < kSolveVectors; ++n) {
                    sums[m][n] = load(x + (i + m) * x_row + c + n * kLanes);
                }
            }
            for (int j = i + kSolveRows; j < rows; ++j) {
                const float* factors = system + j * system_row + i;
                for (int n = 0; n < kSolveVectors; ++n) {
                    const Vec solved = load(x + j * x_row + c + n * kLanes);
#pragma GCC unroll 4
                    for (int m = 0; m < kSolveRows; ++m) {
                        sums[m][n] -= factors[m] * solved;
                    }
                }
            }
#pragma GCC unroll 4
            for (int m = kSolveRows - 1; m >= 0; --m) {
#pragma GCC unroll 2
                for (int n = 0; n < kSolveVectors; ++n) {
#pragma GCC unroll 4
                    for (int j = kSolveRows - 1; j > m; --j) {
                        sums[m][n] -= system[(i + j) * system_row + i + m] * sums[j][n];
                    }
                    store(x + (i + m) * x_row + c + n * kLanes, sums[m][n]);
                }
            }
#pragma GCC unroll 2
            for (int m = 0; m < kSolveRows; m += 2) {
                done(i + m, c, sums[m], sums[m + 1]);
            }
        }
    }
}

}  // namespace hybridcp::HCP_ISA
