#include "kernels/gdn_bf16_emulation.h"

#include <ATen/ATen.h>

#include <limits>

namespace hybridcp::test {
namespace {

using at::Tensor;

Tensor rounded(const Tensor& x) {
    return x.to(at::kBFloat16).to(at::kFloat);
}

/// The product of bf16 operands with fp32 sums.
Tensor product(const Tensor& a, const Tensor& b) {
    return at::matmul(rounded(a), rounded(b));
}

/// Rows of one chunk of one value head, and what the forward pass finds.
struct Chunk {
    Tensor q, k, v, g, beta;  // [C, K], [C, K], [C, V], [C, 1], [C, 1]
    Tensor d_o;               // [C, V]
    double scale = 1;
    Tensor gamma, to_end, total, decay;  // [C, 1], [C, 1], [], [C, C]
    Tensor H;                            // [K, V] at the start
    Tensor L, T, E, D, P;
    bool like_kernels = false;
    bool images = false;
};

/// (I + L)^-1 x, or its transpose times x.
Tensor solved(const Chunk& c, const Tensor& x, bool transposed) {
    if (!c.like_kernels) {
        return product(transposed ? c.T.t() : c.T, x);
    }
    const Tensor system = at::eye(c.L.size(0)) + c.L;
    return at::linalg_solve_triangular(transposed ? system.t() : system, x, transposed);
}

/// Steps H to the end of the chunk; returns o.
Tensor forward(Chunk& c, Tensor& H) {
    const Tensor b = c.g.to(at::kDouble).clamp_min(-1000).cumsum(0);
    const Tensor last = b.narrow(0, b.size(0) - 1, 1);
    const Tensor above = at::ones({b.size(0), b.size(0)}, at::kBool).triu(1);
    c.gamma = b.exp().to(at::kFloat);
    c.to_end = (last - b).exp().to(at::kFloat);
    c.total = last.exp().to(at::kFloat).squeeze();
    c.decay = (b - b.t())
                  .masked_fill(above, -std::numeric_limits<double>::infinity())
                  .exp()
                  .to(at::kFloat);
    c.H = H;
    c.L = (c.beta * product(c.k, c.k.t()) * c.decay).tril(-1);
    const Tensor one = at::eye(b.size(0));
    c.T = at::linalg_solve_triangular(one + c.L, one, false);
    c.E = c.v - c.gamma * product(c.k, H);
    c.D = solved(c, c.beta * c.E, false);
    c.P = c.scale * product(c.q, c.k.t()) * c.decay;
    H = c.total * H + product(c.k.t(), c.to_end * c.D);
    return c.scale * c.gamma * product(c.q, c.H) + product(c.P, c.D);
}

struct ChunkGradients {
    Tensor dq, dk, dv, dg, dbeta;
};

/// Steps dH back to the start of the chunk.
ChunkGradients backward(const Chunk& c, Tensor& dH) {
    const auto image = [&](const Tensor& x) { return c.images ? rounded(x) : x; };
    const Tensor H = image(c.H), E = image(c.E);
    const Tensor dD = image(product(c.P.t(), c.d_o) + c.to_end * product(c.k, dH));
    const Tensor dR = solved(c, dD, true);
    const Tensor dE = c.beta * dR;
    const Tensor dP = c.scale * product(c.d_o, c.D.t()) * c.decay;
    const Tensor dL = -product(dR, c.D.t()).tril(-1);
    const Tensor dN = dL * c.beta * c.decay;
    const Tensor dq_state = c.scale * c.gamma * product(c.d_o, c.H.t());
    const Tensor dk_write = c.to_end * product(c.D, dH.t());
    const Tensor dk_read = -c.gamma * product(dE, c.H.t());
    const auto dot = [](const Tensor& x, const Tensor& y) { return (x * y).sum(-1, true); };

    const Tensor N = product(c.d_o, c.D.t()) * c.P + dL * c.L;
    const Tensor from_start = dot(c.q, dq_state) + dot(c.k, dk_read);
    const Tensor to_end = dot(c.k, dk_write);
    const std::int64_t C = c.q.size(0);
    const Tensor later = at::ones({C, C}).triu();
    const Tensor earlier = at::ones({C, C}).tril(-1);
    ChunkGradients result;
    result.dg = at::matmul(later, from_start) + at::matmul(earlier, to_end) +
                (at::matmul(later, N) * earlier).sum(-1, true) + c.total * (image(dH) * H).sum();
    result.dq = dq_state + product(dP, c.k);
    result.dk = dk_write + dk_read + product(dP.t(), c.q) + product(dN + dN.t(), c.k);
    result.dv = dE;
    result.dbeta = dot(dR, E) + (dL * product(c.k, c.k.t()) * c.decay).sum(-1, true);
    const Tensor read = c.like_kernels ? product(c.q.t(), c.scale * c.gamma * c.d_o)
                                       : c.scale * product((c.gamma * c.q).t(), c.d_o);
    dH = c.total * dH + read - product(c.k.t(), c.gamma * dE);
    return result;
}

/// Adds the gradient of one segment and value head into `sums`.
void run_segment(const GdnCase& gdn_case,
                 const EmulationOptions& options,
                 std::int64_t segment,
                 std::int64_t head,
                 Tensors& sums) {
    const GdnInputs& in = gdn_case.inputs;
    const std::int64_t key_head = head / (in.v.size(1) / in.q.size(1));
    const std::int64_t end = gdn_case.offsets[static_cast<std::size_t>(segment) + 1];
    Tensor H = sums.at("S_end")[segment][head].clone();
    std::vector<Chunk> chunks;
    const auto first = gdn_case.offsets[static_cast<std::size_t>(segment)];
    const auto rows_of = [&](std::size_t i) {
        const std::int64_t begin = first + static_cast<std::int64_t>(i) * options.chunk_size;
        return [=](const Tensor& x, std::int64_t h) {
            return x.narrow(0, begin, std::min(options.chunk_size, end - begin)).select(1, h);
        };
    };
    for (std::size_t i = 0; first + static_cast<std::int64_t>(i) * options.chunk_size < end; ++i) {
        const auto rows = rows_of(i);
        Chunk c;
        c.q = rows(sums.at("q_unit"), key_head);
        c.k = rows(sums.at("k_unit"), key_head);
        c.v = rows(in.v, head).to(at::kFloat);
        c.g = rows(in.g, head).unsqueeze(1);
        c.beta = rows(in.beta, head).to(at::kFloat).unsqueeze(1);
        c.d_o =
            gdn_case.d_o.defined() ? rows(gdn_case.d_o, head).to(at::kFloat) : at::zeros_like(c.v);
        c.scale =
            gdn_case.options.scale.value_or(1.0 / std::sqrt(static_cast<double>(in.q.size(2))));
        c.like_kernels = options.like_kernels;
        c.images = options.images;
        rows(sums.at("o"), head).copy_(forward(c, H));
        chunks.push_back(c);
    }
    sums.at("S_end")[segment][head].copy_(H);
    Tensor dH = sums.at("dS_start")[segment][head].clone();
    for (std::size_t i = chunks.size(); i-- > 0;) {
        const auto rows = rows_of(i);
        const ChunkGradients gradients = backward(chunks[i], dH);
        rows(sums.at("dq"), key_head).add_(gradients.dq);
        rows(sums.at("dk"), key_head).add_(gradients.dk);
        rows(sums.at("dv"), head).copy_(gradients.dv);
        rows(sums.at("dg"), head).copy_(gradients.dg.squeeze(1));
        rows(sums.at("dbeta"), head).copy_(gradients.dbeta.squeeze(1));
    }
    sums.at("dS_start")[segment][head].copy_(dH);
}

}  // namespace

Tensors bf16_emulation(const GdnCase& gdn_case, const EmulationOptions& options) {
    const GdnInputs& in = gdn_case.inputs;
    const auto zeros = [](const Tensor& x) { return at::zeros(x.sizes(), at::kFloat); };
    const std::vector<std::int64_t> states = {
        static_cast<std::int64_t>(gdn_case.offsets.size()) - 1, in.v.size(1), in.q.size(2),
        in.v.size(2)};
    const auto state = [&](const Tensor& x) { return x.defined() ? x.clone() : at::zeros(states); };
    Tensors sums = {{"o", zeros(in.v)},
                    {"dq", zeros(in.q)},
                    {"dk", zeros(in.k)},
                    {"dv", zeros(in.v)},
                    {"dg", zeros(in.g)},
                    {"dbeta", zeros(in.beta)},
                    {"S_end", state(gdn_case.S_start)},
                    {"dS_start", state(gdn_case.dS_end)}};
    Tensors norms;
    for (const auto& [name, x] :
         {std::pair{"q", in.q.to(at::kFloat)}, std::pair{"k", in.k.to(at::kFloat)}}) {
        norms[name] = gdn_case.options.use_qk_l2norm ? ((x * x).sum(-1, true) + 1e-6).rsqrt()
                                                     : at::ones({x.size(0), x.size(1), 1});
        sums[std::string(name) + "_unit"] = x * norms[name];
    }
    for (std::int64_t segment = 0; segment < states[0]; ++segment) {
        for (std::int64_t head = 0; head < states[1]; ++head) {
            run_segment(gdn_case, options, segment, head, sums);
        }
    }
    for (const std::string name : {"q", "k"}) {
        const Tensor unit = sums.at(name + "_unit");
        Tensor& d_unit = sums.at("d" + name);
        if (gdn_case.options.use_qk_l2norm) {
            d_unit = norms.at(name) * (d_unit - unit * (unit * d_unit).sum(-1, true));
        }
        sums.erase(name + "_unit");
    }
    for (const char* name : {"o", "dq", "dk", "dv", "dbeta"}) {
        sums.at(name) = rounded(sums.at(name));
    }
    return sums;
}

std::vector<EmulationOptions> cpu_emulations() {
    return {EmulationOptions{}, EmulationOptions{.chunk_size = 32, .like_kernels = true}};
}

std::vector<EmulationOptions> cuda_emulations() {
    std::vector<EmulationOptions> emulations = cpu_emulations();
    emulations.push_back({.images = true});
    return emulations;
}

std::map<std::string, double> bf16_yardstick(const GdnCase& gdn_case,
                                             const Tensors& expected,
                                             double (*error)(const Tensor& x,
                                                             const Tensor& reference),
                                             const std::vector<EmulationOptions>& emulations) {
    // With few tokens dg is a handful of numbers, whose error depends by luck on where chunks are
    // cut: one emulation alone would be a matter of luck too.
    std::map<std::string, double> errors;
    for (const EmulationOptions& options : emulations) {
        Tensors emulation = bf16_emulation(gdn_case, options);
        split_extreme_rows(gdn_case, emulation);
        for (const auto& [name, reference] : expected) {
            errors[name] = std::max(errors[name], error(emulation.at(name), reference));
        }
    }
    return errors;
}

}  // namespace hybridcp::test
