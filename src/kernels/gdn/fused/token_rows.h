// Rows of tokens between the tensors of the caller and the buffers of a chunk.
#pragma once

#include "kernels/gdn/fused/fused_kernels.h"
#include "kernels/gdn/fused/transposed_packs.h"

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
          token_row(chunk_tokens) {}

    /// Of states that lie transposed.
    [[nodiscard]] ChunkSizes transposed() const { return {tokens, values, keys}; }
};

/// Rows of a view of which whole vectors may be read.
template <typename Input>
struct TokenRows {
    const Input* data;
    std::int64_t stride;

    [[nodiscard]] HCP_INLINE const Input* row(int r) const { return data + r * stride; }
    /// Two vectors from column c on.
    HCP_INLINE void load_pair(int r, int c, Vec* pair) const {
        pair[0] = load(row(r) + c);
        pair[1] = load(row(r) + c + kLanes);
    }
};

/// Rows [count, dim] at `from`: they themselves, or where tokens or columns end before `rows` and
/// `columns` a copy filled up with zeros.
template <typename Input>
HCP_STAGE TokenRows<Input> whole_rows(
    TokenRows<Input> from, int count, int dim, Input* copy, int rows, int columns) {
    if (count == rows && dim == columns) {
        return from;
    }
    const int stride = padded_row(columns);
    for (int r = 0; r < rows; ++r) {
        std::memset(copy + r * stride, 0, sizeof(Input) * static_cast<std::size_t>(columns));
        if (r < count) {
            std::memcpy(copy + r * stride, from.row(r),
                        sizeof(Input) * static_cast<std::size_t>(dim));
        }
    }
    return {.data = copy, .stride = stride};
}

/// Columns c .. of a row [dim]; those behind its end are left out.
template <typename Output>
HCP_INLINE void store_columns(Output* row, int c, int dim, Vec v) {
    if (c + kLanes <= dim) {
        store(row + c, v);
    } else if (c < dim) {
        store_part(row + c, v, dim - c);
    }
}

/// Rows [count, dim] of the caller's that are written; Streams: past the caches.
template <typename Output, bool Streams = false>
struct OutputRows {
    Output* data;
    std::int64_t stride;
    int count, dim;

    /// A vector from column c on; what is behind the last row or column is left out.
    HCP_INLINE void put(int r, int c, Vec v) const {
        if (r < count) {
            Output* row = data + r * stride;
            if (Streams && c + kLanes <= dim) {
                stream(row + c, v);
            } else {
                store_columns(row, c, dim, v);
            }
        }
    }
};

/// Rows of V, value_row apart, to the caller's.
HCP_STAGE void copy_rows(ChunkSizes sizes, const float* from, OutputRows<float> to) {
    for (int i = 0; i < to.count; ++i) {
        for (int j = 0; j < sizes.values; j += kLanes) {
            to.put(i, j, load(from + i * sizes.value_row + j));
        }
    }
}

template <typename Input>
HCP_INLINE Input* at_token(const GdnView& view, std::int64_t token, std::int64_t head) {
    return static_cast<Input*>(view.data) + token * view.token_stride + head * view.head_stride;
}

template <typename T>
HCP_INLINE float dot(const float* x, const T* y, int count) {
    Vec sum = {};
    for (int i = 0; i < count; i += kLanes) {
        sum += load(x + i) * load(y + i);
    }
    return sum_lanes(sum);
}

}  // namespace hybridcp::HCP_ISA
