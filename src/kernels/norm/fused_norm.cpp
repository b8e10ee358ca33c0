#include "kernels/norm/fused_norm.h"

#include "kernels/norm/norm_kernels.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/simd/dispatch.h"

namespace hybridcp {

HCP_DECLARE_KERNELS(NormKernels, norm_kernels)

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A task leaves one row of sums for the weight: few beside the rows that it reads.
constexpr std::int64_t kLeastRows = 64;

at::TensorOptions wide_options(const at::Tensor& x) {
    return x.options().dtype(at::kFloat);
}

/// Runs body(inputs, rows of y, range) over all rows; x and z as rows.
template <typename Body>
at::Tensor normalise(const NormInputs& inputs, const at::Tensor& like, const Body& body) {
    at::Tensor y = at::empty(like.sizes(), like.options());
    const Rows rows{y.mutable_data_ptr(), inputs.width};
    const std::int64_t num_rows = inputs.width == 0 ? 0 : y.numel() / inputs.width;
    for_each_block(
        num_rows, rows_of_task(inputs.width, kLeastRows),
        [&](Range range, std::int64_t /*block*/, int /*thread*/) { body(inputs, rows, range); });
    return y;
}

/// Runs body(inputs, gradients of a range, range) over all rows; returns the weight's gradient.
template <typename Body>
at::Tensor normalise_backward(const NormInputs& inputs,
                              NormGradients gradients,
                              std::int64_t num_rows,
                              const Body& body) {
    const std::int64_t step = rows_of_task(inputs.width, kLeastRows), width = inputs.width;
    at::Tensor partials = at::empty({count_blocks(num_rows, step), width}, at::kFloat);
    at::Tensor scratch = at::empty({max_threads(), width}, at::kFloat);
    gradients.d_weight = partials.mutable_data_ptr<float>();
    gradients.scratch = scratch.mutable_data_ptr<float>();
    for_each_block(num_rows, step, [&](Range range, std::int64_t block, int thread) {
        NormGradients mine = gradients;
        mine.d_weight += block * width;
        mine.scratch += thread * width;
        body(inputs, mine, range);
    });
    return sum_partials(partials);
}

struct FusedZeroCentered : torch::autograd::Function<FusedZeroCentered> {
    static at::Tensor forward(AutogradContext* context,
                              const at::Tensor& x,
                              const at::Tensor& weight,
                              double eps) {
        const at::Tensor rows = as_rows(x), scale = scale_of(weight);
        at::Tensor inverse = at::empty({rows.size(0)}, wide_options(x));
        context->save_for_backward({x, weight, inverse});
        NormInputs inputs = inputs_of(rows, scale, inverse);
        inputs.eps = static_cast<float>(eps);
        return normalise(inputs, x, norm_kernels(selected_isa()).zero_centered);
    }

    static variable_list backward(AutogradContext* context, variable_list upstream) {
        const variable_list saved = context->get_saved_variables();
        const at::Tensor &x = saved[0], &weight = saved[1], &inverse = saved[2];
        const at::Tensor rows = as_rows(x), dy = as_rows(upstream[0]), scale = scale_of(weight);
        at::Tensor dx = at::empty(x.sizes(), x.options());
        const at::Tensor d_weight =
            normalise_backward(inputs_of(rows, scale, inverse),
                               {.dy = read_rows(dy), .dx = {dx.mutable_data_ptr(), x.size(-1)}},
                               rows.size(0), norm_kernels(selected_isa()).zero_centered_backward);
        return {dx, d_weight.to(weight.scalar_type()), at::Tensor()};
    }

  private:
    static at::Tensor scale_of(const at::Tensor& weight) {
        return (weight.to(at::kFloat) + 1).contiguous();
    }

    static NormInputs inputs_of(const at::Tensor& rows,
                                const at::Tensor& scale,
                                const at::Tensor& inverse) {
        return {.element = element_of(rows),
                .width = rows.size(1),
                .eps = 0,
                .x = read_rows(rows),
                .z = {},
                .weight = scale.const_data_ptr<float>(),
                .inverse = inverse.data_ptr<float>()};
    }
};

struct FusedGated : torch::autograd::Function<FusedGated> {
    static at::Tensor forward(AutogradContext* context,
                              const at::Tensor& x,
                              const at::Tensor& z,
                              const at::Tensor& weight,
                              double eps) {
        at::Tensor inverse =
            at::empty({x.size(-1) == 0 ? 0 : x.numel() / x.size(-1)}, wide_options(x));
        context->save_for_backward({x, z, weight, inverse});
        Call call(x, z, weight, inverse);
        call.inputs.eps = static_cast<float>(eps);
        return normalise(call.inputs, x, norm_kernels(selected_isa()).gated);
    }

    static variable_list backward(AutogradContext* context, variable_list upstream) {
        const variable_list saved = context->get_saved_variables();
        const at::Tensor &x = saved[0], &z = saved[1], &weight = saved[2], &inverse = saved[3];
        const Call call(x, z, weight, inverse);
        const at::Tensor dy = as_rows(upstream[0]);
        at::Tensor dx = at::empty(x.sizes(), x.options()), dz = at::empty(x.sizes(), x.options());
        const at::Tensor d_weight =
            normalise_backward(call.inputs,
                               {.dy = read_rows(dy),
                                .dx = {dx.mutable_data_ptr(), x.size(-1)},
                                .dz = {dz.mutable_data_ptr(), x.size(-1)}},
                               inverse.numel(), norm_kernels(selected_isa()).gated_backward);
        return {dx, dz, d_weight.to(weight.scalar_type()), at::Tensor()};
    }

  private:
    /// The arguments in the form of the kernels; holds what they point to.
    struct Call {
        Call(const at::Tensor& x_rows,
             const at::Tensor& z_rows,
             const at::Tensor& weight_in,
             const at::Tensor& inverse)
            : x(as_rows(x_rows)),
              z(as_rows(z_rows)),
              weight(weight_in.to(at::kFloat).contiguous()) {
            inputs = {.element = element_of(x),
                      .width = x.size(1),
                      .eps = 0,
                      .x = read_rows(x),
                      .z = read_rows(z),
                      .weight = weight.const_data_ptr<float>(),
                      .inverse = inverse.data_ptr<float>()};
        }
        at::Tensor x, z, weight;
        NormInputs inputs{};
    };
};

}  // namespace

at::Tensor fused_norm_zero_centered(const at::Tensor& x, const at::Tensor& weight, double eps) {
    return FusedZeroCentered::apply(x, weight, eps);
}

at::Tensor fused_norm_gated(const at::Tensor& x,
                            const at::Tensor& z,
                            const at::Tensor& weight,
                            double eps) {
    return FusedGated::apply(x, z, weight, eps);
}

}  // namespace hybridcp
