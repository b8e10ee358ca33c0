#include "kernels/attention/partial_attention.h"

#include <ATen/OpMathType.h>

#include <limits>

#include "kernels/attention/tiles.h"

namespace hybridcp {

namespace {

AttentionOperands checked_operands(const AttentionPart& part) {
    AttentionOperands x = make_operands(part.q, part.k, part.v, part.scale);
    check_blocks(part.blocks, part.q.size(0), part.k.size(0));
    return x;
}

// A tile's queries see one key at least, so `part.lse` is finite and no exponent is -inf - -inf.
void merge_tile(AttentionOutput& sum, const Tile& tile, const TileOutput& part) {
    const std::int64_t num_kv_heads = part.o.size(0);
    const at::ScalarType dtype = part.o.scalar_type();
    const at::Tensor lse_rows = sum.lse.unsqueeze(2);
    const at::Tensor before = take_rows(lse_rows, tile, num_kv_heads, dtype);
    const at::Tensor after = at::logaddexp(before, part.lse);
    const at::Tensor o_before = take_rows(sum.o, tile, num_kv_heads, dtype);
    put_rows(sum.o, tile,
             (o_before * (before - after).exp_()).addcmul_(part.o, (part.lse - after).exp_()));
    put_rows(lse_rows, tile, after);
}

}  // namespace

AttentionOutput attention_to_no_keys(const at::Tensor& q) {
    const auto options = q.options().dtype(at::toOpMathType(q.scalar_type()));
    return {
        .o = at::zeros(q.sizes(), options),
        .lse = at::full({q.size(0), q.size(1)}, -std::numeric_limits<double>::infinity(), options)};
}

void attend(const AttentionPart& part, AttentionOutput& sum) {
    const AttentionOperands x = checked_operands(part);
    for (const Tile& tile : cut_into_tiles(part.blocks, part.q.size(1))) {
        merge_tile(sum, tile, attend_tile(x, tile));
    }
}

AttentionRows make_attention_rows(const AttentionOutput& output, const at::Tensor& d_o) {
    const at::ScalarType dtype = output.lse.scalar_type();
    return {.d_o = d_o, .lse = output.lse, .delta = (d_o.to(dtype) * output.o.to(dtype)).sum(2)};
}

void attend_backward(const AttentionPart& part,
                     const AttentionRows& rows,
                     const AttentionGradients& sums) {
    const AttentionOperands x = checked_operands(part);
    const std::int64_t num_kv_heads = x.keys.size(0);
    const at::ScalarType dtype = x.keys.scalar_type();
    KeyGradients keys{.d_keys = sums.dk.transpose(0, 1), .d_values = sums.dv.transpose(0, 1)};
    for (const Tile& tile : cut_into_tiles(part.blocks, part.q.size(1))) {
        const at::Tensor queries = scaled_queries(x, tile);
        const at::Tensor lse = take_rows(rows.lse.unsqueeze(2), tile, num_kv_heads, dtype);
        const TileRows back{
            .queries = queries,
            .weights = masked_scores(x, tile, queries).sub_(lse).exp_(),
            .d_o = take_rows(rows.d_o, tile, num_kv_heads, dtype),
            .row_mean = take_rows(rows.delta.unsqueeze(2), tile, num_kv_heads, dtype)};
        const at::Tensor dq = take_rows(sums.dq, tile, num_kv_heads, dtype);
        put_rows(sums.dq, tile, dq + backward_tile(x, tile, back, keys));
    }
}

}  // namespace hybridcp
