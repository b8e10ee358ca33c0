#include "gdn_cuda/gradients_support.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "gdn_cuda/operands.h"
#include "gdn_cuda/support.h"
#include "kernels/gdn/cuda/head_scale.cuh"
#include "simt/half.h"
#include "simt/swizzle.h"

namespace hybridcp::test {

namespace {

using gdn::cuda::Chunk;
using gdn::cuda::kChunkTokens;
using gdn::cuda::kFp16;
using gdn::cuda::kHeadDim;
using gdn::cuda::kPanelBytes;

at::Tensor rounded(const at::Tensor& x) {
    return x.to(at::kBFloat16).to(at::kDouble);
}

at::Tensor make_gates(Gates gates, at::IntArrayRef shape, const at::Generator& generator) {
    const at::Tensor uniform = at::rand(shape, generator, at::kDouble);
    switch (gates) {
        case Gates::kNone:
            return at::zeros(shape, at::kDouble);
        case Gates::kStrong:
            return -21.0 * (0.8 + 0.4 * uniform);
        case Gates::kMixed:
            return at::where(uniform < 0.1, -30.0, -1e-3);
        case Gates::kWithReset:
        case Gates::kSlow:
            break;
    }
    at::Tensor g = -0.12 * uniform;
    if (gates == Gates::kWithReset) {
        g.select(0, shape[0] / 3).fill_(-INFINITY);
    }
    return g;
}

/// The panels of rows x columns, both multiples of 64, one after another, over 2^exponent.
void put_panels(const at::Tensor& matrix, int exponent, bool as_f16, std::uint8_t* to) {
    const at::Tensor floats = (matrix * std::exp2(-exponent)).to(at::kFloat).contiguous();
    const auto* values = floats.const_data_ptr<float>();
    const auto rows = static_cast<std::uint32_t>(floats.size(0));
    const auto columns = static_cast<std::uint32_t>(floats.size(1));
    for (std::uint32_t row = 0; row < rows; ++row) {
        for (std::uint32_t column = 0; column < columns; ++column) {
            const float value = values[std::size_t{row} * columns + column];
            const std::uint16_t bits = as_f16 ? simt::f16_bits(value) : simt::bf16_bits(value);
            const std::uint32_t panel = row / 64 * (columns / 64) + column / 64;
            const std::uint32_t at = device::swizzle_128(row % 64 * 128 + column % 64 * 2);
            std::memcpy(to + std::size_t{panel} * kPanelBytes + at, &bits, 2);
        }
    }
}

/// Rows of `stride` elements from one another, over 2^exponent.
void put_rows(
    const at::Tensor& rows, int exponent, bool as_f16, std::int64_t stride, std::uint16_t* to) {
    const at::Tensor floats = (rows * std::exp2(-exponent)).to(at::kFloat).contiguous();
    const auto value = floats.accessor<float, 2>();
    for (std::int64_t row = 0; row < floats.size(0); ++row) {
        for (std::int64_t column = 0; column < floats.size(1); ++column) {
            const float x = value[row][column];
            to[row * stride + column] = as_f16 ? simt::f16_bits(x) : simt::bf16_bits(x);
        }
    }
}

/// T over all 64 tokens: 1 on the diagonal beyond the chunk.
void put_inverse(const at::Tensor& inverse, std::uint8_t* to) {
    at::Tensor all = at::eye(kChunkTokens, at::kFloat);
    const auto n = inverse.size(0);
    all.narrow(0, 0, n).narrow(1, 0, n).copy_(inverse);
    const auto entry = all.accessor<float, 2>();
    for (std::uint32_t row = 0; row < kChunkTokens; ++row) {
        for (std::uint32_t column = 0; column < 16 * (row / 16 + 1); ++column) {
            const std::uint16_t bits = simt::f16_bits(entry[row][column]);
            std::memcpy(to + inverse_at(row, column), &bits, 2);
        }
    }
}

at::Tensor norms(const at::Tensor& x, bool use_qk_l2norm) {
    const at::Tensor squares = x.square().sum(-1);
    return use_qk_l2norm ? (squares + 1e-6).rsqrt() : at::ones_like(squares);
}

/// One chunk of one value head.
struct HeadChunk {
    at::Tensor k, q, v, d_o, beta, gamma, to_end, gam;  // k, q normalised
    at::Tensor all;                                     // e^B
    at::Tensor state, errors, inverse;                  // H, E, T
};

HeadChunk open_chunk(const GradientsProblem& problem, Chunk span, std::int64_t head) {
    const auto rows = [span](const at::Tensor& x, std::int64_t h) {
        return x.narrow(0, span.token, span.tokens).select(1, h);
    };
    const GdnInputs& in = problem.inputs;
    const auto key_head = head / (in.v.size(1) / in.k.size(1));
    HeadChunk chunk;
    chunk.k = rows(in.k, key_head);
    chunk.q = rows(in.q, key_head);
    chunk.k = chunk.k * norms(chunk.k, problem.use_qk_l2norm).unsqueeze(1);
    chunk.q = chunk.q * norms(chunk.q, problem.use_qk_l2norm).unsqueeze(1);
    chunk.v = rows(in.v, head);
    chunk.d_o = rows(problem.d_o, head);
    chunk.beta = rows(in.beta, head).unsqueeze(1);
    const at::Tensor sum = rows(in.g, head).clamp_min(-88.0).cumsum(0);
    chunk.gamma = sum.exp().unsqueeze(1);
    chunk.all = sum[-1].exp();
    chunk.to_end = (sum[-1] - sum).exp().unsqueeze(1);
    chunk.gam = (sum.unsqueeze(1) - sum.unsqueeze(0)).tril().exp().tril();
    return chunk;
}

/// Fills in the state before the chunk and what follows from it; returns the state after it.
at::Tensor pass_forward(HeadChunk& chunk, const at::Tensor& state) {
    const at::Tensor system = (chunk.beta * chunk.k.mm(chunk.k.t()) * chunk.gam).tril(-1);
    const at::Tensor one = at::eye(chunk.k.size(0), at::kDouble);
    chunk.inverse = at::linalg_solve_triangular(one + system, one, false);
    chunk.state = state;
    chunk.errors = chunk.v - chunk.gamma * chunk.k.mm(state);
    const at::Tensor solved = chunk.inverse.mm(chunk.beta * chunk.errors);
    return chunk.all * state + chunk.k.t().mm(chunk.to_end * solved);
}

/// Z from the gradient of the state after the chunk; the gradient of the state before it.
at::Tensor pass_back(const HeadChunk& chunk, double scale, const at::Tensor& after, at::Tensor& z) {
    const at::Tensor reads = scale * chunk.q.mm(chunk.k.t()) * chunk.gam;
    z = reads.t().mm(chunk.d_o) + chunk.to_end * chunk.k.mm(after);
    const at::Tensor de = chunk.beta * chunk.inverse.t().mm(z);
    return chunk.all * after + scale * (chunk.gamma * chunk.q).t().mm(chunk.d_o) -
           chunk.k.t().mm(chunk.gamma * de);
}

/// A segment's chunks of one head.
void remake_head(const GradientsProblem& problem,
                 std::int64_t segment,
                 std::int64_t head,
                 std::size_t first,
                 std::size_t last,
                 Remade& made) {
    std::vector<HeadChunk> chunks;
    at::Tensor state = problem.S_start[segment][head];
    for (std::size_t i = first; i < last; ++i) {
        chunks.push_back(open_chunk(problem, made.chunks[i], head));
        state = pass_forward(chunks.back(), state);
    }
    at::Tensor gradient = problem.dS_end[segment][head];
    for (std::size_t i = last; i-- > first;) {
        const HeadChunk& chunk = chunks[i - first];
        at::Tensor z;
        const at::Tensor before = pass_back(chunk, problem.scale, gradient, z);
        const std::size_t at = static_cast<std::size_t>(head) * made.chunks.size() + i;
        Images& to = made.images;
        const auto index = static_cast<std::size_t>(head);
        const int exponent =
            gdn::cuda::kFp16 ? gdn::cuda::exponent_of(made.largest[index], gdn::cuda::kRoomOfValues)
                             : 0;
        const int of_gradients =
            gdn::cuda::kFp16 ? gdn::cuda::exponent_of(
                                   made.largest_gradients[index],
                                   gdn::cuda::room_of_gradients(static_cast<float>(problem.scale),
                                                                problem.use_qk_l2norm))
                             : 0;
        const std::int64_t stride = problem.inputs.v.size(1) * kHeadDim;
        const auto rows = static_cast<std::size_t>(made.chunks[i].token * stride + head * kHeadDim);
        put_rows(chunk.errors, exponent, kFp16, stride, &to.errors[rows]);
        put_rows(z, of_gradients, kFp16, stride, &to.value_gradients[rows]);
        put_inverse(chunk.inverse, &to.inverses[at * gdn::cuda::kInverseBytes]);
        put_panels(chunk.state.t(), exponent, kFp16, &to.states[at * gdn::cuda::kStateBytes]);
        put_panels(gradient.t(), of_gradients, kFp16,
                   &to.state_gradients[at * gdn::cuda::kStateBytes]);
        gradient = before;
    }
}

/// Of each head of rows and of states, in bits.
std::vector<std::uint32_t> largest_of(const at::Tensor& rows, const at::Tensor& states) {
    const at::Tensor most =
        at::maximum(rows.abs().amax({0, 2}), states.abs().amax({0, 2, 3})).to(at::kFloat);
    std::vector<std::uint32_t> bits;
    for (std::int64_t head = 0; head < most.size(0); ++head) {
        bits.push_back(std::bit_cast<std::uint32_t>(most[head].item<float>()));
    }
    return bits;
}

}  // namespace

GradientsProblem make_problem(const GradientsCase& wanted) {
    const at::Generator generator = at::detail::createCPUGenerator(wanted.seed);
    const auto tokens = wanted.offsets.back() + wanted.padding;
    const auto heads = wanted.key_heads * wanted.group;
    const auto segments = static_cast<std::int64_t>(wanted.offsets.size()) - 1;
    const auto normal = [&generator](at::IntArrayRef shape) {
        return at::randn(shape, generator, at::kDouble);
    };
    GradientsProblem problem;
    problem.offsets = wanted.offsets;
    problem.scale = 1 / std::sqrt(static_cast<double>(kHeadDim));
    problem.use_qk_l2norm = wanted.use_qk_l2norm;
    GdnInputs& in = problem.inputs;
    in.q = normal({tokens, wanted.key_heads, kHeadDim});
    in.k = normal({tokens, wanted.key_heads, kHeadDim});
    if (!wanted.use_qk_l2norm) {
        in.q = in.q / in.q.norm(2, -1, true);
        in.k = in.k / in.k.norm(2, -1, true);
    }
    in.q = rounded(in.q);
    in.k = rounded(in.k);
    in.v = rounded(wanted.value_size * normal({tokens, heads, kHeadDim}));
    in.g = make_gates(wanted.gates, {tokens, heads}, generator).to(at::kFloat).to(at::kDouble);
    in.beta = rounded(2 * at::rand({tokens, heads}, generator, at::kDouble));
    in.beta.slice(0, 1, tokens, 7).fill_(0.0);
    in.beta.slice(0, 4, tokens, 7).fill_(2.0);
    problem.d_o = rounded(wanted.gradient_size * normal({tokens, heads, kHeadDim})) *
                  (wanted.has_d_o ? 1.0 : 0.0);
    const double size = wanted.has_states ? 1.0 : 0.0;
    problem.S_start = size * wanted.value_size * normal({segments, heads, kHeadDim, kHeadDim});
    problem.dS_end =
        size * 0.1 * wanted.gradient_size * normal({segments, heads, kHeadDim, kHeadDim});
    for (std::int64_t head = 1; head < heads; ++head) {  // exact powers of two
        in.v.select(1, head).mul_(std::exp2(wanted.head_step * static_cast<int>(head)));
        problem.S_start.select(1, head).mul_(std::exp2(wanted.head_step * static_cast<int>(head)));
        problem.d_o.select(1, head).mul_(std::exp2(-2 * wanted.head_step * static_cast<int>(head)));
        problem.dS_end.select(1, head).mul_(
            std::exp2(-2 * wanted.head_step * static_cast<int>(head)));
    }
    return problem;
}

GdnGradients reference_gradients(const GradientsProblem& problem) {
    const auto call =
        make_gdn_call(GdnBackend::kReference, problem.inputs, problem.offsets,
                      {.use_qk_l2norm = problem.use_qk_l2norm, .scale = problem.scale});
    (void)call->forward(problem.S_start);
    return call->backward(problem.d_o, problem.dS_end);
}

Remade remake(const GradientsProblem& problem) {
    Remade made;
    const auto heads = problem.inputs.v.size(1);
    std::vector<std::size_t> first;
    for (std::size_t s = 0; s + 1 < problem.offsets.size(); ++s) {
        first.push_back(made.chunks.size());
        for (std::int64_t token = problem.offsets[s]; token < problem.offsets[s + 1];
             token += kChunkTokens) {
            const auto count = std::min<std::int64_t>(kChunkTokens, problem.offsets[s + 1] - token);
            made.chunks.push_back(
                {static_cast<std::int32_t>(token), static_cast<std::int32_t>(count)});
        }
    }
    first.push_back(made.chunks.size());
    const std::size_t count = made.chunks.size() * static_cast<std::size_t>(heads);
    made.largest = largest_of(problem.inputs.v, problem.S_start);
    made.largest_gradients = largest_of(problem.d_o, problem.dS_end);
    const auto elements = static_cast<std::size_t>(problem.inputs.v.numel());
    made.images.errors.assign(elements, 0x7fff);
    made.images.value_gradients.assign(elements, 0x7fff);
    made.images.inverses.resize(count * gdn::cuda::kInverseBytes);
    made.images.states.resize(count * gdn::cuda::kStateBytes);
    made.images.state_gradients.resize(count * gdn::cuda::kStateBytes);
    for (std::size_t s = 0; s + 1 < first.size(); ++s) {
        for (std::int64_t head = 0; head < heads; ++head) {
            remake_head(problem, static_cast<std::int64_t>(s), head, first[s], first[s + 1], made);
        }
    }
    made.r_k = norms(problem.inputs.k, problem.use_qk_l2norm).t().to(at::kFloat).contiguous();
    made.r_q = norms(problem.inputs.q, problem.use_qk_l2norm).t().to(at::kFloat).contiguous();
    return made;
}

std::vector<std::uint16_t> bf16_of(const at::Tensor& x) {
    std::vector<std::uint16_t> bits;
    for (const float value : floats_of(x)) {
        bits.push_back(simt::bf16_bits(value));
    }
    return bits;
}

std::vector<float> floats_of(const at::Tensor& x) {
    const at::Tensor floats = x.to(at::kFloat).contiguous();
    const auto* values = floats.const_data_ptr<float>();
    return {values, values + floats.numel()};
}

}  // namespace hybridcp::test
