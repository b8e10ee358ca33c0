#include "kernels/attention/attention.h"

#include <ATen/OpMathType.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "hybridcp/error.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Scores that exist at once, all heads together: few enough to stay in a cache.
constexpr std::int64_t kTileScores = std::int64_t{1} << 19;
constexpr std::int64_t kMinTileRows = 32;  // fewer make the products slow
constexpr std::int64_t kMaxTileRows = 256;

/// Some queries of a block and the prefix of its keys that the last of them sees.
struct Tile {
    std::int64_t q_begin = 0;
    std::int64_t num_rows = 0;
    std::int64_t kv_begin = 0;
    std::int64_t num_keys = 0;
};

std::vector<Tile> cut_into_tiles(const std::vector<AttentionBlock>& blocks,
                                 std::int64_t num_heads) {
    std::vector<Tile> tiles;
    for (const AttentionBlock& block : blocks) {
        const std::int64_t num_keys = block.kv_end - block.kv_begin;
        for (std::int64_t begin = block.q_begin; begin < block.q_end;) {
            const std::int64_t affordable =
                kTileScores / std::max<std::int64_t>(num_heads * num_keys, 1);
            const std::int64_t rows =
                std::min(std::clamp(affordable, kMinTileRows, kMaxTileRows), block.q_end - begin);
            const std::int64_t hidden_keys = block.q_end - begin - rows;
            tiles.push_back({begin, rows, block.kv_begin, num_keys - hidden_keys});
            begin += rows;
        }
    }
    return tiles;
}

/// Rows of q [Tq, Hq, D] of one tile as [Hkv, rows * G, D]: all query heads of a KV head side by
/// side, so that one product serves them and keys are never repeated.
at::Tensor take_rows(const at::Tensor& q,
                     const Tile& tile,
                     std::int64_t num_kv_heads,
                     at::ScalarType dtype) {
    const std::int64_t group = q.size(1) / num_kv_heads;
    return q.narrow(0, tile.q_begin, tile.num_rows)
        .to(dtype)
        .reshape({tile.num_rows, num_kv_heads, group, q.size(2)})
        .transpose(0, 1)
        .reshape({num_kv_heads, tile.num_rows * group, q.size(2)});
}

/// The inverse: writes [Hkv, rows * G, D] into the tile's rows of `target` [Tq, Hq, D].
void put_rows(const at::Tensor& target, const Tile& tile, const at::Tensor& values) {
    const std::int64_t num_kv_heads = values.size(0), dim = values.size(2);
    const std::int64_t group = target.size(1) / num_kv_heads;
    target.narrow(0, tile.q_begin, tile.num_rows)
        .view({tile.num_rows, num_kv_heads, group, dim})
        .copy_(values.view({num_kv_heads, tile.num_rows, group, dim}).transpose(0, 1));
}

/// [Tk, Hkv, D] as [Hkv, Tk, D] in the dtype of the products; a view where the dtype is that
/// already.
at::Tensor heads_first(const at::Tensor& x, at::ScalarType dtype) {
    return x.to(dtype).transpose(0, 1);
}

at::Tensor keys_of(const at::Tensor& heads_first, const Tile& tile) {
    return heads_first.narrow(1, tile.kv_begin, tile.num_keys);
}

/// Scaled scores of a tile, -inf where a query would see a later key: [Hkv, rows * G, keys]. Only
/// the last `rows` keys have such places.
at::Tensor masked_scores(const at::Tensor& scaled_queries,
                         const at::Tensor& keys,
                         const Tile& tile) {
    at::Tensor scores = at::bmm(scaled_queries, keys.transpose(1, 2));
    const std::int64_t rows = tile.num_rows;
    const at::Tensor future =
        at::ones({rows, rows}, scores.options().dtype(at::kBool)).triu_(1).unsqueeze(1);
    scores.view({scores.size(0), rows, -1, tile.num_keys})
        .narrow(3, tile.num_keys - rows, rows)
        .masked_fill_(future, -kInfinity);
    return scores;
}

std::vector<std::int64_t> flatten(const std::vector<AttentionBlock>& blocks) {
    std::vector<std::int64_t> numbers;
    for (const AttentionBlock& block : blocks) {
        numbers.insert(numbers.end(), {block.q_begin, block.q_end, block.kv_begin, block.kv_end});
    }
    return numbers;
}

std::vector<AttentionBlock> unflatten(const std::vector<std::int64_t>& numbers) {
    std::vector<AttentionBlock> blocks;
    for (std::size_t i = 0; i < numbers.size(); i += 4) {
        blocks.push_back({numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]});
    }
    return blocks;
}

struct CausalAttention : torch::autograd::Function<CausalAttention> {
    static variable_list forward(AutogradContext* context,
                                 const at::Tensor& q,
                                 const at::Tensor& k,
                                 const at::Tensor& v,
                                 const std::vector<AttentionBlock>& blocks,
                                 double scale) {
        const at::ScalarType dtype = at::toOpMathType(q.scalar_type());
        const at::Tensor keys = heads_first(k, dtype);
        const at::Tensor values = heads_first(v, dtype);
        at::Tensor o = at::zeros(q.sizes(), q.options());
        at::Tensor lse = at::full({q.size(0), q.size(1), 1}, -kInfinity, q.options().dtype(dtype));
        for (const Tile& tile : cut_into_tiles(blocks, q.size(1))) {
            const at::Tensor queries = take_rows(q, tile, keys.size(0), dtype) * scale;
            const at::Tensor scores = masked_scores(queries, keys_of(keys, tile), tile);
            const at::Tensor weights = scores.softmax(2);
            put_rows(o, tile, at::bmm(weights, keys_of(values, tile)));
            // The largest weight is exp(0) / sum: one pass less than to sum again.
            put_rows(lse, tile, scores.amax(2, true).sub_(weights.amax(2, true).log_()));
        }
        lse = lse.squeeze(2);
        context->save_for_backward({q, k, v});
        context->saved_data["blocks"] = flatten(blocks);
        context->saved_data["scale"] = scale;
        context->mark_non_differentiable({lse});
        return {o, lse};
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const variable_list saved = context->get_saved_variables();
        const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &d_o = gradients[0];
        const std::vector<AttentionBlock> blocks =
            unflatten(context->saved_data["blocks"].toIntVector());
        const double scale = context->saved_data["scale"].toDouble();
        const at::ScalarType dtype = at::toOpMathType(q.scalar_type());
        const at::Tensor keys = heads_first(k, dtype);
        const at::Tensor values = heads_first(v, dtype);
        at::Tensor dq = at::zeros(q.sizes(), q.options());
        at::Tensor dk = at::zeros(keys.sizes(), keys.options());  // [Hkv, Tk, D]
        at::Tensor dv = at::zeros(keys.sizes(), keys.options());
        for (const Tile& tile : cut_into_tiles(blocks, q.size(1))) {
            const std::int64_t num_kv_heads = keys.size(0);
            const at::Tensor tile_keys = keys_of(keys, tile);
            const at::Tensor queries = take_rows(q, tile, num_kv_heads, dtype) * scale;
            const at::Tensor d_rows = take_rows(d_o, tile, num_kv_heads, dtype);
            const at::Tensor weights = masked_scores(queries, tile_keys, tile).softmax(2);
            keys_of(dv, tile).baddbmm_(weights.transpose(1, 2), d_rows);
            at::Tensor d_scores = at::bmm(d_rows, keys_of(values, tile).transpose(1, 2));
            // A tile has the whole row of each query, so the row's weighted mean comes from the
            // weights themselves: unlike <d_o, o>, it is not off by the rounding of a bf16 output.
            d_scores.mul_(weights);
            d_scores.addcmul_(weights, d_scores.sum(2, true), -1);
            put_rows(dq, tile, at::bmm(d_scores, tile_keys).mul_(scale));
            keys_of(dk, tile).baddbmm_(d_scores.transpose(1, 2), queries);
        }
        return {dq, dk.transpose(0, 1).to(k.scalar_type()), dv.transpose(0, 1).to(v.scalar_type()),
                at::Tensor(), at::Tensor()};
    }
};

void check_shapes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
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
}

void check_blocks(std::vector<AttentionBlock> blocks,
                  std::int64_t num_queries,
                  std::int64_t num_keys) {
    std::sort(blocks.begin(), blocks.end(), [](const AttentionBlock& a, const AttentionBlock& b) {
        return a.q_begin < b.q_begin;
    });
    std::int64_t covered = 0;
    for (const AttentionBlock& block : blocks) {
        const auto text = [&] {
            return fmt::format("causal_attention: block q [{}, {}), keys [{}, {})", block.q_begin,
                               block.q_end, block.kv_begin, block.kv_end);
        };
        HCP_CHECK(block.q_begin >= 0 && block.q_begin <= block.q_end &&
                      block.q_end <= num_queries && block.kv_begin >= 0 &&
                      block.kv_begin <= block.kv_end && block.kv_end <= num_keys,
                  "{} is not inside {} queries and {} keys", text(), num_queries, num_keys);
        HCP_CHECK(block.q_end - block.q_begin <= block.kv_end - block.kv_begin,
                  "{} has more queries than keys", text());
        HCP_CHECK(block.q_begin == block.q_end || block.q_begin >= covered,
                  "{} overlaps the queries of another block", text());
        covered = std::max(covered, block.q_end);
    }
}

}  // namespace

AttentionOutput causal_attention(const at::Tensor& q,
                                 const at::Tensor& k,
                                 const at::Tensor& v,
                                 const std::vector<AttentionBlock>& blocks,
                                 double scale) {
    check_shapes(q, k, v);
    check_blocks(blocks, q.size(0), k.size(0));
    const variable_list results = CausalAttention::apply(q, k, v, blocks, scale);
    return {results[0], results[1]};
}

}  // namespace hybridcp
