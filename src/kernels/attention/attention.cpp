#include "kernels/attention/attention.h"

#include <fmt/ranges.h>

#include <limits>
#include <utility>

#include "hybridcp/error.h"
#include "kernels/attention/tiles.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Call : torch::CustomClassHolder {
    std::vector<AttentionBlock> blocks;
    double scale = 1.0;
    at::Tensor known_o;  // of an earlier call

    [[nodiscard]] AttentionPart with(const at::Tensor& q,
                                     const at::Tensor& k,
                                     const at::Tensor& v) const {
        return {.q = q, .k = k, .v = v, .blocks = blocks, .scale = scale};
    }
};

struct CausalAttention : torch::autograd::Function<CausalAttention> {
    static variable_list forward(AutogradContext* context,
                                 const at::Tensor& q,
                                 const at::Tensor& k,
                                 const at::Tensor& v,
                                 const c10::intrusive_ptr<Call>& call) {
        context->save_for_backward({q, k, v});
        context->saved_data["call"] = c10::IValue::make_capsule(call);
        if (call->known_o.defined()) {
            return {std::exchange(call->known_o, at::Tensor())};
        }
        const AttentionOutput output = attend_whole(call->with(q, k, v));
        context->mark_non_differentiable({output.lse});
        return {output.o, output.lse};
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const variable_list saved = context->get_saved_variables();
        const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
        const auto holder = context->saved_data["call"].toCapsule();
        const AttentionGradients sums =
            attend_whole_backward(static_cast<const Call&>(*holder).with(q, k, v), gradients[0]);
        return {sums.dq, sums.dk.to(k.scalar_type()), sums.dv.to(v.scalar_type()), at::Tensor()};
    }
};

}  // namespace

AttentionOutput causal_attention(const at::Tensor& q,
                                 const at::Tensor& k,
                                 const at::Tensor& v,
                                 const std::vector<AttentionBlock>& blocks,
                                 double scale) {
    auto call = c10::make_intrusive<Call>();
    call->blocks = blocks;
    call->scale = scale;
    const variable_list results = CausalAttention::apply(q, k, v, call);
    return {results[0], results[1]};
}

at::Tensor recall_attention(const AttentionPart& whole, const at::Tensor& o) {
    HCP_CHECK(o.sizes() == whole.q.sizes() && o.scalar_type() == whole.q.scalar_type(),
              "attention: the o of an earlier call is [{}], q is [{}]", fmt::join(o.sizes(), ", "),
              fmt::join(whole.q.sizes(), ", "));
    auto call = c10::make_intrusive<Call>();
    call->blocks.assign(whole.blocks.begin(), whole.blocks.end());
    call->scale = whole.scale;
    call->known_o = o;
    return CausalAttention::apply(whole.q, whole.k, whole.v, call)[0];
}

AttentionOutput attend_whole(const AttentionPart& whole) {
    const at::Tensor& q = whole.q;
    const AttentionOperands x = make_operands(q, whole.k, whole.v, whole.scale);
    check_blocks(whole.blocks, q.size(0), whole.k.size(0));
    const at::Tensor o = at::zeros(q.sizes(), q.options());
    const at::Tensor lse =
        at::full({q.size(0), q.size(1), 1}, -std::numeric_limits<double>::infinity(),
                 q.options().dtype(x.keys.scalar_type()));
    for (const Tile& tile : cut_into_tiles(whole.blocks, q.size(1))) {
        const TileOutput output = attend_tile(x, tile);
        put_rows(o, tile, output.o);
        put_rows(lse, tile, output.lse);
    }
    return {.o = o, .lse = lse.squeeze(2)};
}

AttentionGradients attend_whole_backward(const AttentionPart& whole, const at::Tensor& d_o) {
    const at::Tensor& q = whole.q;
    const AttentionOperands x = make_operands(q, whole.k, whole.v, whole.scale);
    const at::ScalarType dtype = x.keys.scalar_type();
    const at::Tensor dq = at::zeros(q.sizes(), q.options());
    KeyGradients sums{.d_keys = at::zeros(x.keys.sizes(), x.keys.options()),
                      .d_values = at::zeros(x.keys.sizes(), x.keys.options())};
    for (const Tile& tile : cut_into_tiles(whole.blocks, q.size(1))) {
        const at::Tensor queries = scaled_queries(x, tile);
        // A tile has the whole row of each query, so the row's weighted mean comes from the weights
        // themselves: unlike <d_o, o>, it is not off by the rounding of a bf16 output.
        const TileRows rows{.queries = queries,
                            .weights = masked_scores(x, tile, queries).softmax(2),
                            .d_o = take_rows(d_o, tile, x.keys.size(0), dtype),
                            .row_mean = at::Tensor()};
        put_rows(dq, tile, backward_tile(x, tile, rows, sums));
    }
    return {.dq = dq, .dk = sums.d_keys.transpose(0, 1), .dv = sums.d_values.transpose(0, 1)};
}

}  // namespace hybridcp
