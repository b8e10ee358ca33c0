#include "kernels/norm/rms_norm.h"

#include <ATen/OpMathType.h>
#include <fmt/ranges.h>

#include "hybridcp/error.h"
#include "kernels/norm/fused_norm.h"
#include "kernels/pointwise/pointwise.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// rsqrt(mean(x^2) + eps) over the last dim, kept: [..., 1].
at::Tensor inverse_rms(const at::Tensor& x, double eps) {
    return x.square().mean(-1, true).add_(eps).rsqrt_();
}

/// Gradient of x * inverse_rms(x) with respect to x; `normed` is that product.
at::Tensor normalisation_backward(const at::Tensor& d_normed,
                                  const at::Tensor& normed,
                                  const at::Tensor& inverse) {
    const at::Tensor projection = (d_normed * normed).mean(-1, true);
    return at::addcmul(d_normed, normed, projection, -1).mul_(inverse);
}

/// Sum over all rows: [..., D] -> [D].
at::Tensor sum_rows(const at::Tensor& x) {
    return x.reshape({-1, x.size(-1)}).sum(0);
}

struct ZeroCenteredNorm : torch::autograd::Function<ZeroCenteredNorm> {
    static at::Tensor forward(AutogradContext* context,
                              const at::Tensor& x,
                              const at::Tensor& weight,
                              double eps) {
        const at::ScalarType dtype = at::toOpMathType(x.scalar_type());
        const at::Tensor wide = x.to(dtype);
        const at::Tensor inverse = inverse_rms(wide, eps);
        context->save_for_backward({x, weight, inverse});
        return (wide * inverse).mul_(weight.to(dtype) + 1).to(x.scalar_type());
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const variable_list saved = context->get_saved_variables();
        const at::Tensor &x = saved[0], &weight = saved[1], &inverse = saved[2];
        const at::ScalarType dtype = inverse.scalar_type();
        const at::Tensor dy = gradients[0].to(dtype);
        const at::Tensor normed = x.to(dtype) * inverse;
        at::Tensor dx, dweight;
        if (context->needs_input_grad(0)) {
            dx = normalisation_backward(dy * (weight.to(dtype) + 1), normed, inverse);
            dx = dx.to(x.scalar_type());
        }
        if (context->needs_input_grad(1)) {
            dweight = sum_rows(dy * normed).to(weight.scalar_type());
        }
        return {dx, dweight, at::Tensor()};
    }
};

struct GatedNorm : torch::autograd::Function<GatedNorm> {
    static at::Tensor forward(AutogradContext* context,
                              const at::Tensor& x,
                              const at::Tensor& z,
                              const at::Tensor& weight,
                              double eps) {
        const at::ScalarType narrow = x.scalar_type();
        const at::ScalarType dtype = at::toOpMathType(narrow);
        const at::Tensor wide = x.to(dtype);
        const at::Tensor inverse = inverse_rms(wide, eps);
        context->save_for_backward({x, z, weight, inverse});
        const at::Tensor weighted = weighted_normed(wide * inverse, weight, narrow).second;
        return at::silu(z.to(dtype)).mul_(weighted).to(narrow);
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const variable_list saved = context->get_saved_variables();
        const at::Tensor &x = saved[0], &z = saved[1], &weight = saved[2], &inverse = saved[3];
        const at::ScalarType dtype = inverse.scalar_type();
        const at::Tensor dy = gradients[0].to(dtype);
        const at::Tensor z_wide = z.to(dtype);
        const at::Tensor normed = x.to(dtype) * inverse;
        const auto [rounded, weighted] = weighted_normed(normed, weight, x.scalar_type());
        at::Tensor dx, dz, dweight;
        if (context->needs_input_grad(1)) {
            dz = at::silu_backward(dy * weighted, z_wide).to(z.scalar_type());
        }
        const at::Tensor d_weighted = at::silu(z_wide).mul_(dy);
        if (context->needs_input_grad(0)) {
            dx = normalisation_backward(d_weighted * weight.to(dtype), normed, inverse);
            dx = dx.to(x.scalar_type());
        }
        if (context->needs_input_grad(2)) {
            dweight = sum_rows(d_weighted * rounded).to(weight.scalar_type());
        }
        return {dx, dz, dweight, at::Tensor()};
    }

  private:
    /// The normalised values and their product with the weight, each rounded to `narrow` as the
    /// public model does, both returned in the wide dtype.
    static std::pair<at::Tensor, at::Tensor> weighted_normed(const at::Tensor& normed,
                                                             const at::Tensor& weight,
                                                             at::ScalarType narrow) {
        const at::ScalarType dtype = normed.scalar_type();
        const at::Tensor rounded = normed.to(narrow).to(dtype);
        return {rounded, (rounded * weight.to(dtype)).to(narrow).to(dtype)};
    }
};

void check_norm_arguments(const char* name, const at::Tensor& x, const at::Tensor& weight) {
    HCP_CHECK(x.is_floating_point(), "{}: x must have a floating-point dtype", name);
    HCP_CHECK(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(-1),
              "{}: weight must be [D] for x [..., D], got {} and {}", name,
              fmt::join(weight.sizes(), "x"), fmt::join(x.sizes(), "x"));
}

}  // namespace

at::Tensor rms_norm_zero_centered(const at::Tensor& x, const at::Tensor& weight, double eps) {
    check_norm_arguments("rms_norm_zero_centered", x, weight);
    return takes_fused({x}) ? fused_norm_zero_centered(x, weight, eps)
                            : ZeroCenteredNorm::apply(x, weight, eps);
}

at::Tensor rms_norm_gated(const at::Tensor& x,
                          const at::Tensor& z,
                          const at::Tensor& weight,
                          double eps) {
    check_norm_arguments("rms_norm_gated", x, weight);
    HCP_CHECK(z.sizes() == x.sizes(), "rms_norm_gated: z must have x's shape {}, got {}",
              fmt::join(x.sizes(), "x"), fmt::join(z.sizes(), "x"));
    return takes_fused({x, z}) ? fused_norm_gated(x, z, weight, eps)
                               : GatedNorm::apply(x, z, weight, eps);
}

}  // namespace hybridcp
