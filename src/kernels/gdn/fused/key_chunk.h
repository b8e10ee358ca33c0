// What the value heads of a key head share in a chunk: q and k, normalised, as operands, and their
// products. Legend: C rows of a chunk, of which `count` are tokens; rows behind them are zero.
#pragma once

#include "kernels/gdn/fused/fused_kernels.h"
#include "kernels/gdn/fused/packs.h"
#include "kernels/gdn/fused/workspace.h"

namespace hybridcp::HCP_ISA {

/// Sizes of a task, head dims filled up to whole panels.
struct ChunkSizes {
    int tokens;     // C
    int keys;       // K, padded
    int values;     // V, padded
    int key_row;    // stride of rows of K
    int value_row;  // of V
    int token_row;  // of C

    ChunkSizes(int chunk_tokens, int key_dim, int columns)
        : tokens(chunk_tokens),
          keys(round_up(key_dim, kPanel)),
          values(round_up(columns, kPanel)),
          key_row(padded_row(keys)),
          value_row(padded_row(values)),
          token_row(padded_row(chunk_tokens)) {}
};

/// Asks for rows [count, dim] ahead of their use: tokens lie too far apart for the hardware to
/// guess.
template <bool kWrite, typename T>
HCP_STAGE void prefetch_rows(const T* rows, std::int64_t stride, int count, int dim) {
    constexpr int kLine = 64 / static_cast<int>(sizeof(T));
    for (int r = 0; r < count; ++r) {
        for (int c = 0; c < dim; c += kLine) {
            __builtin_prefetch(rows + r * stride + c, kWrite ? 1 : 0, 2);
        }
    }
}

/// Rows [count, dim] of a view as fp32 with stride `to_stride`; zeros up to `rows` and `columns`.
template <typename Input>
HCP_INLINE void load_rows(const Input* from,
                          std::int64_t stride,
                          int count,
                          int dim,
                          float* to,
                          int to_stride,
                          int rows,
                          int columns) {
    const int whole = dim / kLanes * kLanes;
    for (int r = 0; r < count; ++r) {
        const Input* row = from + r * stride;
        float* out = to + r * to_stride;
        int c = 0;
        for (; c < whole; c += kLanes) {
            store(out + c, load(row + c));
        }
        if (c < dim) {
            store(out + c, load_part(row + c, dim - c));
            c += kLanes;
        }
        for (; c < columns; c += kLanes) {
            store(out + c, Vec{});
        }
    }
    for (int r = count; r < rows; ++r) {
        for (int c = 0; c < columns; c += kLanes) {
            store(to + r * to_stride + c, Vec{});
        }
    }
}

/// The reverse: rows of fp32 rounded to a view.
template <typename Output>
HCP_STAGE void store_rows(
    const float* from, int from_stride, int count, int dim, Output* to, std::int64_t stride) {
    const int whole = dim / kLanes * kLanes;
    for (int r = 0; r < count; ++r) {
        const float* row = from + r * from_stride;
        int c = 0;
        for (; c < whole; c += kLanes) {
            store(to + r * stride + c, load(row + c));
        }
        if (c < dim) {
            store_part(to + r * stride + c, load(row + c), dim - c);
        }
    }
}

template <typename Input>
HCP_INLINE Input* at_token(const GdnView& view, std::int64_t token, std::int64_t head) {
    return static_cast<Input*>(view.data) + token * view.token_stride + head * view.head_stride;
}

HCP_INLINE float dot(const float* x, const float* y, int count) {
    Vec sum = {};
    for (int i = 0; i < count; i += kLanes) {
        sum += load(x + i) * load(y + i);
    }
    return sum_lanes(sum);
}

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
            rows_left<Engine>(left, element_row(sizes)), {k_columns, columns_panel(sizes)}, rows,
            round_up(rows, kPanel), [&](int) { return DepthRange{0, depth}; },
            [&](int i, int j, Vec first, Vec second) {
                store(to + i * sizes.token_row + j, first * factor);
                store(to + (i + 1) * sizes.token_row + j, second * factor);
            });
    }

    __attribute__((noinline)) void pack_tokens(const ChunkSizes& sizes) {
        alignas(64) float ones[kLargestChunk * 2];
        for (float& one : ones) {
            one = 1.0F;
        }
        pack_rows_as_depth<Engine>(q, sizes.key_row, ones, 2 * rows, sizes.keys, tokens,
                                   tokens_panel());
    }

    static constexpr int kLargestChunk = 64;
};

}  // namespace hybridcp::HCP_ISA
