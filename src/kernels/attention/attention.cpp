#include "kernels/attention/attention.h"

#include <limits>

#include "kernels/attention/tiles.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Call : torch::CustomClassHolder {
    std::vector<AttentionBlock> blocks;
    double scale = 1.0;
};

struct CausalAttention : torch::autograd::Function<CausalAttention> {
    static variable_list forward(AutogradContext* context,
                                 const at::Tensor& q,
                                 const at::Tensor& k,
                                 const at::Tensor& v,
                                 const c10::intrusive_ptr<Call>& call) {
        const AttentionOperands x = make_operands(q, k, v, call->scale);
        check_blocks(call->blocks, q.size(0), k.size(0));
        at::Tensor o = at::zeros(q.sizes(), q.options());
        at::Tensor lse =
            at::full({q.size(0), q.size(1), 1}, -std::numeric_limits<double>::infinity(),
                     q.options().dtype(x.keys.scalar_type()));
        for (const Tile& tile : cut_into_tiles(call->blocks, q.size(1))) {
            const TileOutput output = attend_tile(x, tile);
            put_rows(o, tile, output.o);
            put_rows(lse, tile, output.lse);
        }
        lse = lse.squeeze(2);
        context->save_for_backward({q, k, v});
        context->saved_data["call"] = c10::IValue::make_capsule(call);
        context->mark_non_differentiable({lse});
        return {o, lse};
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const variable_list saved = context->get_saved_variables();
        const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
        const auto holder = context->saved_data["call"].toCapsule();
        const auto& call = static_cast<const Call&>(*holder);
        const AttentionOperands x = make_operands(q, k, v, call.scale);
        const at::ScalarType dtype = x.keys.scalar_type();
        at::Tensor dq = at::zeros(q.sizes(), q.options());
        KeyGradients sums{.d_keys = at::zeros(x.keys.sizes(), x.keys.options()),
                          .d_values = at::zeros(x.keys.sizes(), x.keys.options())};
        for (const Tile& tile : cut_into_tiles(call.blocks, q.size(1))) {
            const at::Tensor queries = scaled_queries(x, tile);
            // A tile has the whole row of each query, so the row's weighted mean comes from the
            // weights themselves: unlike <d_o, o>, it is not off by the rounding of a bf16 output.
            const TileRows rows{.queries = queries,
                                .weights = masked_scores(x, tile, queries).softmax(2),
                                .d_o = take_rows(gradients[0], tile, x.keys.size(0), dtype),
                                .row_mean = at::Tensor()};
            put_rows(dq, tile, backward_tile(x, tile, rows, sums));
        }
        return {dq, sums.d_keys.transpose(0, 1).to(k.scalar_type()),
                sums.d_values.transpose(0, 1).to(v.scalar_type()), at::Tensor()};
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

}  // namespace hybridcp
