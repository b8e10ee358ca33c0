// What a value head adds to a chunk: its gates, the decays between rows, the triangular system, and
// the solves with it.
#pragma once

#include "kernels/gdn/fused/key_chunk.h"
#include "kernels/simd/exponential.h"

namespace hybridcp::HCP_ISA {

using VecDouble = double __attribute__((vector_size(HCP_VECTOR_BYTES * 2)));

/// Log decays below this are a full reset (kernels/gdn/backends.h, kLogDecayFloor).
inline constexpr double kLowestLogDecay = -1000.0;

/// Summed log decay of tokens of one head.
HCP_INLINE double sum_log_decay(const GdnView& g,
                                std::int64_t head,
                                std::int64_t begin,
                                std::int64_t end) {
    double sum = 0;
    for (std::int64_t t = begin; t < end; ++t) {
        const double value = *at_token<const float>(g, t, head);
        sum += value < kLowestLogDecay ? kLowestLogDecay : value;
    }
    return sum;
}

struct HeadChunk {
    float decay = 1.0F;  // e^B
    float* beta;         // [C]
    float* gamma;        // [C] e^b
    float* to_end;       // [C] e^{B-b}
    float* gam;          // [C, C] e^{b_i - b_j} for i >= j, else 0
    float* system;       // [C, C] L; entries on and above the diagonal are 0

    HeadChunk(Workspace& space, const ChunkSizes& sizes) {
        const std::int64_t square = static_cast<std::int64_t>(sizes.tokens) * sizes.token_row;
        beta = space.take<float>(sizes.tokens);
        gamma = space.take<float>(sizes.tokens);
        to_end = space.take<float>(sizes.tokens);
        gam = space.take<float>(square);
        system = space.take<float>(square);
    }

    /// Gates of the tokens token .. token + count - 1, from the products in `keys`.
    template <typename Engine>
    void fill(const GdnProblemView& problem,
              const ChunkSizes& sizes,
              const KeyChunk<Engine>& keys,
              std::int64_t head,
              std::int64_t token) {
        alignas(64) double b[kMostTokens];
        alignas(64) float sums[kMostTokens], remaining[kMostTokens];
        double sum = 0;
        for (int i = 0; i < keys.rows; ++i) {
            beta[i] = 0;
            if (i < keys.count) {
                const double g = *at_token<const float>(problem.g, token + i, head);
                sum += g < kLowestLogDecay ? kLowestLogDecay : g;
                beta[i] = *at_token<const float>(problem.beta, token + i, head);
            }
            b[i] = sum;
            sums[i] = static_cast<float>(sum);
        }
        for (int i = 0; i < keys.rows; ++i) {
            remaining[i] = static_cast<float>(sum - b[i]);
        }
        for (int i = 0; i < keys.rows; i += kLanes) {
            store(gamma + i, bounded_exp(load(sums + i)));
            store(to_end + i, bounded_exp(load(remaining + i)));
        }
        decay = bounded_exp(broadcast(static_cast<float>(sum)))[0];
        fill_squares(sizes, keys, b);
    }

  private:
    static constexpr int kMostTokens = 64;

    template <typename Engine>
    __attribute__((noinline)) void fill_squares(const ChunkSizes& sizes,
                                                const KeyChunk<Engine>& keys,
                                                const double* b) {
        VecInt lane;
        for (int i = 0; i < kLanes; ++i) {
            lane[i] = i;
        }
        for (int i = 0; i < keys.rows; ++i) {
            const int row = i * sizes.token_row;
            for (int j = 0; j < keys.rows; j += kLanes) {
                Vec decays = {}, below = {};
                if (j <= i) {
                    VecDouble later;
                    std::memcpy(&later, b + j, sizeof(later));
                    const Vec difference = __builtin_convertvector(b[i] - later, Vec);
                    const VecInt column = lane + j;
                    decays = bounded_exp(select(column <= i, difference, broadcast(-1000.0F)));
                    below = select(column < i, beta[i] * decays * load(keys.kk + row + j), Vec{});
                }
                store(gam + row + j, decays);
                store(system + row + j, below);
            }
        }
    }
};

inline constexpr int kSolveRows = 4;

/// x <- (I + L)^-1 x for x [rows, columns] fp32.
HCP_STAGE void solve(
    const float* system, int system_row, float* x, int x_row, int rows, int columns) {
    constexpr int kWide = 2;
    for (int c = 0; c < columns; c += kWide * kLanes) {
        for (int i = 0; i < rows; i += kSolveRows) {
            const float* factors = system + i * system_row;
            Vec sums[kSolveRows][kWide];
            for (int m = 0; m < kSolveRows; ++m) {
                for (int n = 0; n < kWide; ++n) {
                    sums[m][n] = load(x + (i + m) * x_row + c + n * kLanes);
                }
            }
            for (int j = 0; j < i; ++j) {
                for (int n = 0; n < kWide; ++n) {
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
                for (int n = 0; n < kWide; ++n) {
#pragma GCC unroll 4
                    for (int j = 0; j < m; ++j) {
                        sums[m][n] -= factors[m * system_row + i + j] * sums[j][n];
                    }
                    store(x + (i + m) * x_row + c + n * kLanes, sums[m][n]);
                }
            }
        }
    }
}

/// x <- (I + L)^-T x.
HCP_STAGE void solve_transposed(
    const float* system, int system_row, float* x, int x_row, int rows, int columns) {
    constexpr int kWide = 2;
    for (int c = 0; c < columns; c += kWide * kLanes) {
        for (int i = rows - kSolveRows; i >= 0; i -= kSolveRows) {
            Vec sums[kSolveRows][kWide];
            for (int m = 0; m < kSolveRows; ++m) {
                for (int n = 0; n < kWide; ++n) {
                    sums[m][n] = load(x + (i + m) * x_row + c + n * kLanes);
                }
            }
            for (int j = i + kSolveRows; j < rows; ++j) {
                const float* factors = system + j * system_row + i;
                for (int n = 0; n < kWide; ++n) {
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
                for (int n = 0; n < kWide; ++n) {
#pragma GCC unroll 4
                    for (int j = kSolveRows - 1; j > m; --j) {
                        sums[m][n] -= system[(i + j) * system_row + i + m] * sums[j][n];
                    }
                    store(x + (i + m) * x_row + c + n * kLanes, sums[m][n]);
                }
            }
        }
    }
}

}  // namespace hybridcp::HCP_ISA
