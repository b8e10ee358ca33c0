// The gradients inside the chunks, written out (docs/kernels.md, backward): the solve's adjoint is
// dL = -dR D^T below the diagonal, and the gate gradient adds up the paths that cross each token,
// so that nothing cancels under strong decay.
#include <ATen/ATen.h>

#include "kernels/gdn/eager.h"

namespace hybridcp::gdn {
namespace {

using at::Tensor;

Tensor row_dot(const Tensor& x, const Tensor& y) {
    return (x * y).sum(-1, true);
}

/// <x_key, y_value> by row for x [A, C, K] and y [B, C, K]: [B, C, 1].
Tensor row_dot_value_heads(const Tensor& x, const Tensor& y, std::int64_t group) {
    return times_value_heads(x, y, group).sum(-1, true);
}

/// Takes the gradient of x^ = x r to that of x, r = rsqrt(|x|^2 + eps) its saved norm.
Tensor normalise_backward(const Tensor& d_unit, const Tensor& unit, const Tensor& norm) {
    if (!norm.defined()) {
        return d_unit;
    }
    return at::addcmul(d_unit, unit, row_dot(unit, d_unit), -1).mul_(norm);
}

/// The terms of the gate gradient, each a path that crosses a token.
struct GatePaths {
    Tensor from_start;  // [B, C, 1] chunk start to row i: crosses all t <= i
    Tensor to_end;      // [B, C, 1] row i to chunk end: crosses all t > i
    Tensor inside;      // [B, C, C] row j to row i >= j: crosses j < t <= i
    Tensor through;     // [B, 1, 1] chunk start to chunk end: crosses all
};

/// Sum over the paths that cross each row: [B, C]. Exactly 0 at a reset: every path across it has
/// decayed to 0.
Tensor log_decay_gradient(const GatePaths& paths) {
    const std::int64_t C = paths.inside.size(1);
    // later[t, i] = 1 for i >= t
    const Tensor later = at::ones({C, C}, paths.inside.options()).triu_();
    const Tensor earlier = at::ones({C, C}, paths.inside.options()).tril_(-1);
    Tensor from_later = at::matmul(later, paths.inside);  // [t, j] = sum over i >= t
    Tensor d_g = from_later.mul_(earlier).sum(-1, true);
    d_g.add_(at::matmul(later, paths.from_start));
    d_g.add_(at::matmul(earlier, paths.to_end));
    return d_g.add_(paths.through).squeeze(-1);
}

}  // namespace

GdnGradients chunk_gradients(const Problem& problem,
                             const ChunkLayout& layout,
                             const ChunkFactors& factors,
                             const ChunkPasses& passes) {
    const GdnInputs& in = problem.inputs;
    const std::int64_t group = factors.group;
    const auto& [forward, reverse, gradient] = passes;
    const Tensor& states = forward.states;                          // H
    const Tensor d_states = reverse.states;                         // dH'
    Tensor d_r = solve_transposed(factors.system, reverse.values);  // dR

    // Products with the states. U = K H is never formed: <dR_i, U_i> = <k_i, (dR H^T)_i>.
    Tensor d_q_read = at::bmm(gradient.d_o, states.mT()).mul_(factors.gamma * problem.scale);
    Tensor d_k_state = at::bmm(forward.values, d_states.mT()).mul_(factors.decay_to_end);
    const Tensor erased = at::bmm(d_r, states.mT()).mul_(factors.gamma);
    const Tensor erased_k = row_dot_value_heads(factors.k, erased, group);  // gamma <dR, U>
    GatePaths paths;
    paths.from_start =
        row_dot_value_heads(factors.q, d_q_read, group).sub_(factors.beta * erased_k);
    paths.to_end = row_dot_value_heads(factors.k, d_k_state, group);
    // In place: the states are the largest tensors, and this is the last use of the gradients.
    paths.through = d_states.mul_(states).sum({-2, -1}, true).mul_(factors.chunk_decay);
    d_k_state.addcmul_(erased, factors.beta, -1);

    // Products inside the chunk.
    const Tensor d_p = at::bmm(gradient.d_o, forward.values.mT()).mul_(factors.decay);  // dP / s
    Tensor d_l = at::bmm(d_r, forward.values.mT()).mul_(factors.decay);                 // -dL o Gam
    d_l.diagonal(0, -2, -1).zero_();
    const Tensor d_l_kk = times_value_heads(factors.kk, d_l, group);
    paths.inside = times_value_heads(factors.qk, d_p, group).addcmul_(d_l_kk, factors.beta, -1);
    const Tensor d_qk = sum_value_heads(d_p, group).mul_(problem.scale);        // [A, C, C]
    const Tensor d_kk = sum_value_heads(d_l.mul_(factors.beta), group).neg_();  // [A, C, C] dN

    const Tensor d_q = sum_value_heads(d_q_read, group).baddbmm_(d_qk, factors.k);
    const Tensor d_k = sum_value_heads(d_k_state, group)
                           .baddbmm_(d_qk.mT(), factors.q)
                           .baddbmm_(d_kk + d_kk.mT(), factors.k);
    const Tensor v = layout.to_chunks(in.v, d_r.scalar_type());
    const Tensor d_beta = row_dot(d_r, v).sub_(erased_k).sub_(d_l_kk.sum(-1, true)).squeeze(-1);

    const auto to_tokens = [&](const Tensor& x, const Tensor& like) {
        return layout.to_tokens(x, like.size(1), like.scalar_type());
    };
    return {.dq = to_tokens(normalise_backward(d_q, factors.q, factors.q_norm), in.q),
            .dk = to_tokens(normalise_backward(d_k, factors.k, factors.k_norm), in.k),
            .dv = to_tokens(d_r.mul_(factors.beta), in.v),
            .dg = to_tokens(log_decay_gradient(paths), in.g),
            .dbeta = to_tokens(d_beta, in.beta),
            .dS_start = layout.to_segment_order(reverse.last, problem.value_heads())};
}

}  // namespace hybridcp::gdn
