// What attention over all keys of a query (attention.h) and over some of them (partial_attention.h)
// have in common: blocks cut into tiles, a tile's scores, output and gradients. Legend: G = Hq /
// Hkv query heads of a KV head; R = rows of a tile times G.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention/attention.h"

namespace hybridcp {

/// Some queries of a block and the prefix of its keys that the last of them sees.
struct Tile {
    std::int64_t q_begin = 0;
    std::int64_t num_rows = 0;
    std::int64_t kv_begin = 0;
    std::int64_t num_keys = 0;
    bool causal = true;
};

/// Few enough queries each for the scores of all heads to stay in a cache.
[[nodiscard]] std::vector<Tile> cut_into_tiles(std::span<const AttentionBlock> blocks,
                                               std::int64_t num_heads);

/// q as it came; keys and values [Hkv, Tk, D] in the dtype of the products (views where it is that
/// already).
struct AttentionOperands {
    at::Tensor q;
    at::Tensor keys;
    at::Tensor values;
    double scale = 1.0;
};

/// Errors: UsageError for shapes or dtypes that do not fit.
[[nodiscard]] AttentionOperands make_operands(const at::Tensor& q,
                                              const at::Tensor& k,
                                              const at::Tensor& v,
                                              double scale);
/// Errors: UsageError for a block outside the tensors, a causal one with more queries than keys,
/// one with queries and no keys, or two that share a query.
void check_blocks(std::span<const AttentionBlock> blocks,
                  std::int64_t num_queries,
                  std::int64_t num_keys);

/// Rows of x [Tq, Hq, D] of one tile as [Hkv, R, D] in `dtype`: all query heads of a KV head side
/// by side, so that one product serves them and keys are never repeated.
[[nodiscard]] at::Tensor take_rows(const at::Tensor& x,
                                   const Tile& tile,
                                   std::int64_t num_kv_heads,
                                   at::ScalarType dtype);
/// The inverse: writes [Hkv, R, D] into the tile's rows of `target` [Tq, Hq, D].
void put_rows(const at::Tensor& target, const Tile& tile, const at::Tensor& values);

struct TileOutput {
    at::Tensor o;    // [Hkv, R, D]
    at::Tensor lse;  // [Hkv, R, 1]
};
[[nodiscard]] TileOutput attend_tile(const AttentionOperands& x, const Tile& tile);

/// The tile's queries times the scale, [Hkv, R, D].
[[nodiscard]] at::Tensor scaled_queries(const AttentionOperands& x, const Tile& tile);
/// Their scores, -inf where a query would see a later key: [Hkv, R, keys].
[[nodiscard]] at::Tensor masked_scores(const AttentionOperands& x,
                                       const Tile& tile,
                                       const at::Tensor& queries);

/// A tile on the way back.
struct TileRows {
    at::Tensor queries;  // [Hkv, R, D], scaled
    at::Tensor weights;  // [Hkv, R, keys], the probabilities
    at::Tensor d_o;      // [Hkv, R, D]
    at::Tensor
        row_mean;  // [Hkv, R, 1], of <d_o, v> over all keys that a query sees; undefined: these
};
/// Where the gradients of keys and values are summed: [Hkv, Tk, D], any strides.
struct KeyGradients {
    at::Tensor d_keys;
    at::Tensor d_values;
};
/// Adds the tile's gradients of keys and values to `sums` and returns that of its queries.
[[nodiscard]] at::Tensor backward_tile(const AttentionOperands& x,
                                       const Tile& tile,
                                       const TileRows& rows,
                                       KeyGradients& sums);

}  // namespace hybridcp
