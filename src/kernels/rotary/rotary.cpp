#include "kernels/rotary/rotary.h"

#include <ATen/OpMathType.h>
#include <fmt/ranges.h>

#include <cmath>

#include "hybridcp/error.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/rotary/fused_rotary.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Rotates by +angle or, with sign = -1, by -angle (the transpose, which is the gradient). cos,
/// sin: [T, r/2].
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
    if (takes_fused({x})) {
        return fused_rotate(x, cos, sin, sign);
    }
    const at::ScalarType dtype = at::toOpMathType(x.scalar_type());
    const std::int64_t half = cos.size(1);
    const at::Tensor c = cos.to(dtype).unsqueeze(1);  // [T, 1, r/2]
    const at::Tensor s = sin.to(dtype).unsqueeze(1);
    const at::Tensor first = x.narrow(-1, 0, half).to(dtype);
    const at::Tensor second = x.narrow(-1, half, half).to(dtype);
    at::Tensor y = x.clone(at::MemoryFormat::Contiguous);
    y.narrow(-1, 0, half).copy_((first * c).addcmul_(second, s, -sign));
    y.narrow(-1, half, half).copy_((second * c).addcmul_(first, s, sign));
    return y;
}

struct PartialRotary : torch::autograd::Function<PartialRotary> {
    static at::Tensor forward(AutogradContext* context,
                              const at::Tensor& x,
                              const at::Tensor& cos,
                              const at::Tensor& sin) {
        context->save_for_backward({cos, sin});
        return rotate(x, cos, sin, 1);
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const variable_list saved = context->get_saved_variables();
        return {rotate(gradients[0], saved[0], saved[1], -1), at::Tensor(), at::Tensor()};
    }
};

}  // namespace

RotaryTables make_rotary_tables(const at::Tensor& positions,
                                std::int64_t rotary_dim,
                                double theta,
                                at::ScalarType dtype) {
    HCP_CHECK(positions.dim() == 1 && positions.scalar_type() == at::kLong,
              "make_rotary_tables: positions must be int64 [T], got {} of {} dims",
              at::toString(positions.scalar_type()), positions.dim());
    HCP_CHECK(rotary_dim >= 0 && rotary_dim % 2 == 0,
              "make_rotary_tables: rotary_dim must be even, got {}", rotary_dim);
    // On the host, so that every device has the same frequencies: one unit in the last place of
    // them is radians at far positions. The power is rounded before the division, as in the public
    // model.
    std::vector<float> inv_freq(static_cast<std::size_t>(rotary_dim / 2));
    for (std::size_t i = 0; i < inv_freq.size(); ++i) {
        const float exponent = static_cast<float>(2 * i) / static_cast<float>(rotary_dim);
        inv_freq[i] = 1.0F / static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
    }
    const at::Tensor frequencies = at::tensor(inv_freq).to(positions.device());  // [r/2] fp32
    const at::Tensor angle = positions.to(at::kFloat).unsqueeze(1) * frequencies;
    const at::Tensor both_halves = at::cat({angle, angle}, 1).to(at::kDouble);
    return {both_halves.cos().to(dtype), both_halves.sin().to(dtype)};
}

at::Tensor apply_partial_rotary(const at::Tensor& x, const RotaryTables& tables) {
    const at::Tensor &cos = tables.cos, &sin = tables.sin;
    HCP_CHECK(x.dim() == 3 && cos.dim() == 2 && cos.sizes() == sin.sizes(),
              "apply_partial_rotary: x must be [T, H, D] and cos, sin [T, r], got {}, {} and {}",
              fmt::join(x.sizes(), "x"), fmt::join(cos.sizes(), "x"), fmt::join(sin.sizes(), "x"));
    HCP_CHECK_EQ(cos.size(0), x.size(0), "apply_partial_rotary: rows of the tables and of x");
    HCP_CHECK_LE(cos.size(1), x.size(2), "apply_partial_rotary: rotary dim and head dim");
    const std::int64_t half = cos.size(1) / 2;
    return PartialRotary::apply(x, cos.narrow(1, 0, half), sin.narrow(1, 0, half));
}

}  // namespace hybridcp
