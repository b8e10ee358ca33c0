#include "kernels/attention/tiles.h"

#include <ATen/OpMathType.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "hybridcp/error.h"

namespace hybridcp {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Scores that exist at once, all heads together: few enough to stay in a cache.
constexpr std::int64_t kTileScores = std::int64_t{1} << 19;
constexpr std::int64_t kMinTileRows = 32;  // fewer make the products slow
constexpr std::int64_t kMaxTileRows = 256;

at::Tensor keys_of(const at::Tensor& heads_first, const Tile& tile) {
    return heads_first.narrow(1, tile.kv_begin, tile.num_keys);
}

}  // namespace

std::vector<Tile> cut_into_tiles(std::span<const AttentionBlock> blocks, std::int64_t num_heads) {
    std::vector<Tile> tiles;
    for (const AttentionBlock& block : blocks) {
        const std::int64_t num_keys = block.kv_end - block.kv_begin;
        for (std::int64_t begin = block.q_begin; begin < block.q_end;) {
            const std::int64_t affordable =
                kTileScores / std::max<std::int64_t>(num_heads * num_keys, 1);
            const std::int64_t rows =
                std::min(std::clamp(affordable, kMinTileRows, kMaxTileRows), block.q_end - begin);
            const std::int64_t hidden_keys = block.causal ? block.q_end - begin - rows : 0;
            tiles.push_back({.q_begin = begin,
                             .num_rows = rows,
                             .kv_begin = block.kv_begin,
                             .num_keys = num_keys - hidden_keys,
                             .causal = block.causal});
            begin += rows;
        }
    }
    return tiles;
}

AttentionOperands make_operands(const at::Tensor& q,
                                const at::Tensor& k,
                                const at::Tensor& v,
                                double scale) {
    HCP_CHECK(q.dim() == 3 && k.dim() == 3 && v.sizes() == k.sizes() && q.size(2) == k.size(2),
              "causal_attention: q must be [Tq, Hq, D] and k, v [Tk, Hkv, D], got {}, {} and {}",
              fmt::join(q.sizes(), "x"), fmt::join(k.sizes(), "x"), fmt::join(v.sizes(), "x"));
    HCP_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0,
              "causal_attention: {} query heads are not a multiple of {} KV heads", q.size(1),
              k.size(1));
    HCP_CHECK(q.is_floating_point() && k.scalar_type() == q.scalar_type() &&
                  v.scalar_type() == q.scalar_type(),
              "causal_attention: q, k and v must have one floating-point dtype, got {}, {} and {}",
              at::toString(q.scalar_type()), at::toString(k.scalar_type()),
              at::toString(v.scalar_type()));
    const at::ScalarType dtype = at::toOpMathType(q.scalar_type());
    return {.q = q,
            .keys = k.to(dtype).transpose(0, 1),
            .values = v.to(dtype).transpose(0, 1),
            .scale = scale};
}

void check_blocks(std::span<const AttentionBlock> blocks,
                  std::int64_t num_queries,
                  std::int64_t num_keys) {
    std::vector<AttentionBlock> ordered(blocks.begin(), blocks.end());
    std::sort(ordered.begin(), ordered.end(), [](const AttentionBlock& a, const AttentionBlock& b) {
        return a.q_begin < b.q_begin;
    });
    std::int64_t covered = 0;
    for (const AttentionBlock& block : ordered) {
        const auto text = [&] {
            return fmt::format("causal_attention: block q [{}, {}), keys [{}, {})", block.q_begin,
                               block.q_end, block.kv_begin, block.kv_end);
        };
        HCP_CHECK(block.q_begin >= 0 && block.q_begin <= block.q_end &&
                      block.q_end <= num_queries && block.kv_begin >= 0 &&
                      block.kv_begin <= block.kv_end && block.kv_end <= num_keys,
                  "{} is not inside {} queries and {} keys", text(), num_queries, num_keys);
        const std::int64_t q_count = block.q_end - block.q_begin;
        const std::int64_t kv_count = block.kv_end - block.kv_begin;
        HCP_CHECK(!block.causal || q_count <= kv_count, "{} has more queries than keys", text());
        HCP_CHECK(q_count == 0 || kv_count > 0, "{} has queries and no keys", text());
        HCP_CHECK(q_count == 0 || block.q_begin >= covered,
                  "{} overlaps the queries of another block", text());
        covered = std::max(covered, block.q_end);
    }
}

at::Tensor take_rows(const at::Tensor& x,
                     const Tile& tile,
                     std::int64_t num_kv_heads,
                     at::ScalarType dtype) {
    const std::int64_t group = x.size(1) / num_kv_heads;
    return x.narrow(0, tile.q_begin, tile.num_rows)
        .to(dtype)
        .reshape({tile.num_rows, num_kv_heads, group, x.size(2)})
        .transpose(0, 1)
        .reshape({num_kv_heads, tile.num_rows * group, x.size(2)});
}

void put_rows(const at::Tensor& target, const Tile& tile, const at::Tensor& values) {
    const std::int64_t num_kv_heads = values.size(0), dim = values.size(2);
    const std::int64_t group = target.size(1) / num_kv_heads;
    target.narrow(0, tile.q_begin, tile.num_rows)
        .view({tile.num_rows, num_kv_heads, group, dim})
        .copy_(values.view({num_kv_heads, tile.num_rows, group, dim}).transpose(0, 1));
}

TileOutput attend_tile(const AttentionOperands& x, const Tile& tile) {
    const at::Tensor scores = masked_scores(x, tile, scaled_queries(x, tile));
    const at::Tensor weights = scores.softmax(2);
    // The largest weight is exp(0) / sum: one pass less than to sum again.
    return {.o = at::bmm(weights, keys_of(x.values, tile)),
            .lse = scores.amax(2, true).sub_(weights.amax(2, true).log_())};
}

at::Tensor scaled_queries(const AttentionOperands& x, const Tile& tile) {
    return take_rows(x.q, tile, x.keys.size(0), x.keys.scalar_type()) * x.scale;
}

at::Tensor masked_scores(const AttentionOperands& x, const Tile& tile, const at::Tensor& queries) {
    at::Tensor scores = at::bmm(queries, keys_of(x.keys, tile).transpose(1, 2));
    if (!tile.causal) {
        return scores;
    }
    const std::int64_t rows = tile.num_rows;  // only the last `rows` keys have hidden places
    const at::Tensor future =
        at::ones({rows, rows}, scores.options().dtype(at::kBool)).triu_(1).unsqueeze(1);
    scores.view({scores.size(0), rows, -1, tile.num_keys})
        .narrow(3, tile.num_keys - rows, rows)
        .masked_fill_(future, -kInfinity);
    return scores;
}

at::Tensor backward_tile(const AttentionOperands& x,
                         const Tile& tile,
                         const TileRows& rows,
                         KeyGradients& sums) {
    keys_of(sums.d_values, tile).baddbmm_(rows.weights.transpose(1, 2), rows.d_o);
    at::Tensor d_scores = at::bmm(rows.d_o, keys_of(x.values, tile).transpose(1, 2));
    d_scores.mul_(rows.weights);
    const at::Tensor row_mean = rows.row_mean.defined() ? rows.row_mean : d_scores.sum(2, true);
    d_scores.addcmul_(rows.weights, row_mean, -1);
    keys_of(sums.d_keys, tile).baddbmm_(d_scores.transpose(1, 2), rows.queries);
    return at::bmm(d_scores, keys_of(x.keys, tile)).mul_(x.scale);
}

}  // namespace hybridcp
