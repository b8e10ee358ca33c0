// What a value head adds to a chunk: its gates, the decays between rows, the triangular system, and
// the solves with it.
#pragma once

#include "kernels/gdn/fused/key_chunk.h"
#include "kernels/simd/doubles.h"
#include "kernels/simd/exponential.h"

namespace hybridcp::HCP_ISA {

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

    /// Gates of the tokens token .. token + count - 1, and from the products in `keys` the squares.
    template <typename Engine>
    void fill(const GdnProblemView& problem,
              const ChunkSizes& sizes,
              const KeyChunk<Engine>& keys,
              std::int64_t head,
              std::int64_t token) {
        alignas(64) double b[kMostChunkTokens];
        fill_gates(problem, keys, head, token, b);
        fill_squares(sizes, keys, b);
    }

    /// Gates alone; b: their sums.
    template <typename Engine>
    void fill_gates(const GdnProblemView& problem,
                    const KeyChunk<Engine>& keys,
                    std::int64_t head,
                    std::int64_t token,
                    double* b) {
        alignas(64) float sums[kMostChunkTokens], remaining[kMostChunkTokens];
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
    }

  private:
    template <typename Engine>
    __attribute__((noinline)) void fill_squares(const ChunkSizes& sizes,
                                                const KeyChunk<Engine>& keys,
                                                const double* b) {
        VecInt lane;
        for (int i = 0; i < kLanes; ++i) {
            lane[i] = i;
        }
        const int rows = keys.rows, stride = sizes.token_row;
        const float *betas = beta, *kk = keys.kk;
        float *to_gam = gam, *to_system = system;
        // Across the boundary of two halves a decay is the product of those on its sides.
        alignas(64) float before[kPanel], after[kPanel];
        for (int j = 0; rows > kPanel && j < kPanel; j += kLanes) {
            const double middle = b[kPanel - 1];
            store(before + j, bounded_exp(narrowed(middle - load(b + j))));
            store(after + j, bounded_exp(narrowed(load(b + kPanel + j) - middle)));
        }
        for (int i = 0; i < rows; ++i) {
            const int row = i * stride;
            for (int j = 0; j < rows; j += kLanes) {
                Vec decays = {}, below = {};
                if (i >= kPanel && j < kPanel) {
                    decays = after[i - kPanel] * load(before + j);
                    below = betas[i] * decays * load(kk + row + j);
                } else if (j <= i) {
                    const Vec difference = narrowed(b[i] - load(b + j));
                    const VecInt column = lane + j;
                    decays = bounded_exp(select(column <= i, difference, broadcast(-1000.0F)));
                    below = select(column < i, betas[i] * decays * load(kk + row + j), Vec{});
                }
                store(to_gam + row + j, decays);
                store(to_system + row + j, below);
            }
        }
    }
};

}  // namespace hybridcp::HCP_ISA
