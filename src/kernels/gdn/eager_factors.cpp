// The factors of the chunks that do not depend on the state.
#include <ATen/ATen.h>

#include <limits>

#include "kernels/gdn/eager.h"

namespace hybridcp::gdn {
namespace {

using at::Tensor;

constexpr double kNormEpsilon = 1e-6;

/// Normalises x [A, C, K] in place and returns 1/|x| [A, C, 1].
Tensor normalise_(Tensor& x) {
    Tensor norm = (x * x).sum(-1, true).add_(kNormEpsilon).rsqrt_();
    x.mul_(norm);
    return norm;
}

/// e^{b_i - b_j} for i >= j, else 0, for the summed log decays b [B, C] in fp64. Only differences
/// with the later row first are exponentiated: they are <= 0. The mask comes before the
/// exponential: above the diagonal that would overflow.
Tensor pairwise_decay(const Tensor& b, at::ScalarType type) {
    const std::int64_t C = b.size(1);
    const Tensor mask =
        at::full({C, C}, -std::numeric_limits<double>::infinity(), b.options().dtype(type))
            .triu_(1);
    Tensor decay = (b.unsqueeze(2) - b.unsqueeze(1)).to(type);
    return decay.add_(mask).exp_();
}

}  // namespace

Tensor times_value_heads(const Tensor& x, const Tensor& y, std::int64_t group) {
    if (group == 1) {
        return x * y;
    }
    return (x.unsqueeze(1) * y.unflatten(0, {x.size(0), group})).flatten(0, 1);
}

Tensor sum_value_heads(const Tensor& x, std::int64_t group) {
    return group == 1 ? x : x.unflatten(0, {x.size(0) / group, group}).sum(1);
}

// Solved from the right on the transposes: row-major matrices are the column-major ones that BLAS
// wants.
Tensor solve(const Tensor& system, const Tensor& x) {
    return at::linalg_solve_triangular(system.mT(), x.mT(), /*upper=*/true, /*left=*/false,
                                       /*unitriangular=*/true)
        .mT();
}

Tensor solve_transposed(const Tensor& system, const Tensor& x) {
    return at::linalg_solve_triangular(system, x.mT(), /*upper=*/false, /*left=*/false,
                                       /*unitriangular=*/true)
        .mT();
}

ChunkFactors make_chunk_factors(const Problem& problem,
                                const ChunkLayout& layout,
                                at::ScalarType type) {
    const GdnInputs& in = problem.inputs;
    ChunkFactors f;
    f.group = problem.value_heads() / problem.key_heads();
    f.q = layout.to_chunks(in.q, type);
    f.k = layout.to_chunks(in.k, type);
    if (problem.use_qk_l2norm) {
        f.q_norm = normalise_(f.q);
        f.k_norm = normalise_(f.k);
    }
    f.beta = layout.to_chunks(in.beta, type).unsqueeze(-1);

    // Gates stay in fp64 up to the exponential: fp32 sums lose the small differences next to strong
    // decay.
    const Tensor g = layout.to_chunks(in.g, at::kDouble).clamp_min_(kLogDecayFloor);
    const Tensor b = g.cumsum(-1);                         // [B, C]
    const Tensor total = b.narrow(-1, b.size(-1) - 1, 1);  // [B, 1]
    f.gamma = b.exp().to(type).unsqueeze(-1);
    f.decay_to_end = (total - b).exp_().to(type).unsqueeze(-1);
    f.chunk_decay = total.exp().to(type).unsqueeze(-1);
    f.log_decay = total.squeeze(-1).contiguous();
    f.decay = pairwise_decay(b, type);

    f.kk = at::bmm(f.k, f.k.mT());
    f.qk = at::bmm(f.q, f.k.mT()).mul_(problem.scale);
    f.system = times_value_heads(f.kk, f.decay, f.group).mul_(f.beta);
    f.q_read = times_value_heads(f.q, f.gamma * problem.scale, f.group);
    f.k_write = times_value_heads(f.k, f.decay_to_end, f.group);
    f.k_erase = solve(f.system, times_value_heads(f.k, f.gamma * f.beta, f.group));
    return f;
}

}  // namespace hybridcp::gdn
