// Rows of tokens between the tensors of the caller and the buffers of a chunk.
#pragma once

#include "kernels/gdn/fused/fused_kernels.h"
#include "kernels/gdn/fused/packs.h"

namespace hybridcp::HCP_ISA {

inline constexpr int kMostChunkTokens = 64;

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

}  // namespace hybridcp::HCP_ISA
