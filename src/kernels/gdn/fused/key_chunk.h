// What the value heads of a key head share in a chunk: q and k, normalised, as operands, and their
// products. Legend: C rows of a chunk, of which `count` are tokens; rows behind them are zero.
#pragma once

#include "kernels/gdn/fused/token_rows.h"
#include "kernels/gdn/fused/workspace.h"

namespace hybridcp::HCP_ISA {

template <typename Engine>
struct KeyChunk {
    using Element = typename Engine::Element;
    enum class Use { kOutputs, kStates, kGradients };

    int count = 0;                 // tokens
    int rows = 0;                  // count, rounded up to what products take
    float *q, *k;                  // [C, K] fp32, normalised
    float *q_inverse, *k_inverse;  // [C] 1 / |q|, 1 / |k|; 1 without normalisation
    Element *q_rows, *k_rows;      // [C, K] left operands
    std::uint32_t* k_columns;      // right operand, depth K, columns C
    std::uint32_t* tokens;         // right operand, depth [Q; K] (2C), columns K
    std::uint32_t* transposed;     // left operand, rows K, depth C ([Q; K]: 2C)
    float *kk, *qk;                // [C, C] k k^T, scale * q k^T
    mutable RowsAhead ahead;       // of the next chunk
    float* scratch;                // [2C, K] q and k next to each other

    KeyChunk(Workspace& space, const ChunkSizes& sizes) {
        scratch = space.take<float>(2 * sizes.tokens * sizes.key_row);
        q = k = scratch;
        q_inverse = space.take<float>(sizes.tokens);
        k_inverse = space.take<float>(sizes.tokens);
        q_rows = space.take<Element>(sizes.tokens * 2 * sizes.key_row);
        k_rows = space.take<Element>(sizes.tokens * 2 * sizes.key_row);
        k_columns = space.take<std::uint32_t>(sizes.keys * round_up(sizes.tokens, kPanel));
        tokens = space.take<std::uint32_t>(2 * sizes.tokens * sizes.keys);
        transposed = space.take<std::uint32_t>(2 * sizes.tokens * sizes.keys);
        kk = space.take<float>(sizes.tokens * sizes.token_row);
        qk = space.take<float>(sizes.tokens * sizes.token_row);
    }

    /// Strides of q_rows and k_rows, in elements.
    static int element_row(const ChunkSizes& sizes) { return sizes.keys + 16 * Engine::kPerUnit; }
    static int columns_panel(const ChunkSizes& sizes) {
        return sizes.keys / Engine::kPerUnit * kPanel;
    }
    [[nodiscard]] int tokens_panel() const { return 2 * rows / Engine::kPerUnit * kPanel; }

    template <typename Input>
    void fill(const GdnProblemView& problem,
              const ChunkSizes& sizes,
              std::int64_t key_head,
              std::int64_t token,
              int num_tokens,
              Use use) {
        count = num_tokens;
        rows = round_up(num_tokens, Engine::kRowMultiple);
        k = scratch + rows * sizes.key_row;
        load_normalised<Input>(problem, problem.k, sizes, key_head, token, k, k_inverse, k_rows);
        pack_columns_as_depth<Engine>(k_rows, element_row(sizes), rows, sizes.keys, k_columns,
                                      columns_panel(sizes));
        product(sizes, k_rows, kk, 1.0F);
        if (use != Use::kStates) {
            load_normalised<Input>(problem, problem.q, sizes, key_head, token, q, q_inverse,
                                   q_rows);
            product(sizes, q_rows, qk, problem.scale);
        }
        if (use == Use::kGradients) {
            pack_transposed_left<Engine>(q, sizes.key_row, 2 * rows, sizes.keys, transposed);
            pack_tokens(sizes);
        } else {
            pack_transposed_left<Engine>(k, sizes.key_row, rows, sizes.keys, transposed);
        }
    }

  private:
    template <typename Input>
    __attribute__((noinline)) void load_normalised(const GdnProblemView& problem,
                                                   const GdnView& view,
                                                   const ChunkSizes& sizes,
                                                   std::int64_t head,
                                                   std::int64_t token,
                                                   float* x,
                                                   float* inverse,
                                                   Element* x_rows) {
        const Input* from = at_token<const Input>(view, token, head);
        for (int r = 0; r < rows; ++r) {
            float* row = x + r * sizes.key_row;
            const bool is_token = r < count;
            load_rows(is_token ? from + r * view.token_stride : from, 0, is_token ? 1 : 0,
                      problem.key_dim, row, sizes.key_row, 1, sizes.keys);
            inverse[r] = problem.use_qk_l2norm
                             ? 1.0F / __builtin_sqrtf(dot(row, row, sizes.keys) + 1e-6F)
                             : 1.0F;
            Element* elements = x_rows + r * element_row(sizes);
            const Vec factor = broadcast(inverse[r]);
            for (int c = 0; c < sizes.keys; c += kLanes) {
                const Vec v = load(row + c) * factor;
                store(row + c, v);
                store(elements + c, v);
            }
        }
    }

    __attribute__((noinline)) void product(const ChunkSizes& sizes,
                                           const Element* left,
                                           float* to,
                                           float factor) {
        const int depth = sizes.keys / Engine::kPerUnit;
        Engine::multiply(
            {.left = rows_left<Engine>(left, element_row(sizes)),
             .right = {k_columns, columns_panel(sizes)},
             .rows = rows,
             .columns = round_up(rows, kPanel),
             .ahead = ahead},
            [&](int) { return DepthRange{0, depth}; },
            [&](int i, int j, Vec first, Vec second) {
                store(to + i * sizes.token_row + j, first * factor);
                store(to + (i + 1) * sizes.token_row + j, second * factor);
            });
    }

    __attribute__((noinline)) void pack_tokens(const ChunkSizes& sizes) {
        alignas(64) float ones[kMostChunkTokens * 2];
        for (float& one : ones) {
            one = 1.0F;
        }
        pack_rows_as_depth<Engine>(q, sizes.key_row, ones, 2 * rows, sizes.keys, tokens,
                                   tokens_panel());
    }
};

}  // namespace hybridcp::HCP_ISA
