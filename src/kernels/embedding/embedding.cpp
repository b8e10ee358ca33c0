#include "kernels/embedding/embedding.h"

#include <ATen/OpMathType.h>

#include "core/memory_class.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Embedding : torch::autograd::Function<Embedding> {
    static at::Tensor forward(AutogradContext* context,
                              const at::Tensor& weight,
                              const at::Tensor& token_ids,
                              at::ScalarType compute_dtype) {
        context->save_for_backward({token_ids});
        context->saved_data["vocabulary"] = weight.size(0);
        return weight.index_select(0, token_ids).to(at::toOpMathType(compute_dtype));
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const at::Tensor token_ids = context->get_saved_variables()[0];
        const at::Tensor& dy = gradients[0];
        const MemoryScope scope(MemoryClass::kGradients);
        const std::int64_t vocabulary = context->saved_data["vocabulary"].toInt();
        return {at::zeros({vocabulary, dy.size(1)}, dy.options()).index_add_(0, token_ids, dy),
                at::Tensor(), at::Tensor()};
    }
};

}  // namespace

at::Tensor embed_tokens(const at::Tensor& weight,
                        const at::Tensor& token_ids,
                        at::ScalarType compute_dtype) {
    return Embedding::apply(weight, token_ids, compute_dtype);
}

}  // namespace hybridcp
