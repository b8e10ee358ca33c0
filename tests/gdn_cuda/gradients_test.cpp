// The gradients kernel in the emulator against the fp64 reference.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "gdn_cuda/gradients_support.h"
#include "gdn_cuda/operands.h"
#include "kernels/gdn/cuda/gradients.cuh"
#include "simt/half.h"
#include "simt/launch.h"

namespace hybridcp::test {
namespace {

using gdn::cuda::GradientsConfig;
using gdn::cuda::GradientsParams;
using gdn::cuda::kHeadDim;
using Tensors = std::map<std::string, at::Tensor>;

/// Everything that a launch reads and writes; outputs start as NaN.
struct Launch {
    std::vector<std::uint16_t> q, k, d_o, beta_bf16;
    std::vector<float> g, beta, r_k, r_q;
    std::vector<std::uint16_t> dq, dk, dv, other_errors;  // E and Z before
    std::vector<std::uint32_t> ready;
    std::uint32_t items_taken = 0;
    std::vector<float> dg, dbeta;
    Remade remade;
    GradientsParams params = {};
    bool heads_first;

    Launch(const GradientsCase& wanted, const GradientsProblem& problem);
    void run(std::uint32_t blocks, std::uint64_t seed);
    [[nodiscard]] Tensors results() const;
};

void poison(const GradientsCase& wanted, const GradientsProblem& problem, Launch& launch) {
    const auto spoil = [&](std::int64_t first, std::int64_t last) {
        const auto spoil_rows = [&](auto& rows, auto nan) {
            const auto width = static_cast<std::int64_t>(rows.size()) / problem.d_o.size(0);
            std::fill(rows.begin() + first * width, rows.begin() + last * width, nan);
        };
        for (auto* rows : {&launch.q, &launch.k, &launch.d_o, &launch.beta_bf16}) {
            spoil_rows(*rows, std::uint16_t{0x7fff});
        }
        spoil_rows(launch.g, NAN);
        spoil_rows(launch.beta, NAN);
    };
    spoil(wanted.offsets.back(), wanted.offsets.back() + wanted.padding);
    if (wanted.poisoned >= 0) {
        const auto segment = static_cast<std::size_t>(wanted.poisoned);
        spoil(wanted.offsets[segment], wanted.offsets[segment + 1]);
    }
}

/// In tiles of both panels of a head.
simt::TensorMap map_of(std::vector<std::uint16_t>& rows, std::int64_t heads, std::int64_t tokens) {
    const auto row_bytes = static_cast<std::uint64_t>(kHeadDim) * 2;
    return {
        .data = reinterpret_cast<std::byte*>(rows.data()),
        .extent = {64, static_cast<std::uint32_t>(tokens), static_cast<std::uint32_t>(2 * heads)},
        .stride_bytes = {row_bytes * static_cast<std::uint64_t>(heads), row_bytes / 2},
        .box = {64, 64, 2}};
}

/// E where the kernel expects it: in the places of dq and dk, and the rest.
void place_errors(const GradientsProblem& problem, Launch& launch) {
    const std::int64_t tokens = problem.d_o.size(0), heads = problem.d_o.size(1);
    const std::int64_t key_heads = problem.inputs.k.size(1), group = heads / key_heads;
    launch.other_errors.assign(
        static_cast<std::size_t>(tokens * std::max<std::int64_t>(heads - 2 * key_heads, 1) *
                                 kHeadDim),
        0x7fff);
    std::vector<std::uint16_t>* places[] = {&launch.dq, &launch.dk, &launch.other_errors};
    for (std::int64_t token = 0; token < tokens; ++token) {
        for (std::int64_t head = 0; head < heads; ++head) {
            const gdn::cuda::ErrorPlace place(static_cast<std::int32_t>(head / group),
                                              static_cast<std::int32_t>(head % group),
                                              static_cast<std::int32_t>(group));
            const std::int64_t width = place.index < 2 ? key_heads : heads - 2 * key_heads;
            const auto from =
                launch.remade.images.errors.begin() + (token * heads + head) * kHeadDim;
            std::copy(from, from + kHeadDim,
                      places[place.index]->begin() + (token * width + place.head) * kHeadDim);
        }
    }
    launch.dv = launch.remade.images.value_gradients;
}

Launch::Launch(const GradientsCase& wanted, const GradientsProblem& problem)
    : q(bf16_of(problem.inputs.q)),
      k(bf16_of(problem.inputs.k)),
      d_o(bf16_of(problem.d_o)),
      beta_bf16(bf16_of(problem.inputs.beta)),
      g(floats_of(wanted.heads_first ? problem.inputs.g.t() : problem.inputs.g)),
      beta(floats_of(problem.inputs.beta)),
      dq(q.size(), 0x7fff),
      dk(k.size(), 0x7fff),
      dv(d_o.size(), 0x7fff),
      dg(g.size(), NAN),
      dbeta(g.size(), NAN),
      remade(remake(problem)),
      heads_first(wanted.heads_first) {
    r_k = floats_of(remade.r_k);
    r_q = floats_of(remade.r_q);
    poison(wanted, problem, *this);
    const auto tokens = problem.d_o.size(0), heads = problem.d_o.size(1);
    const auto key_heads = problem.inputs.k.size(1);
    params.k = map_of(k, key_heads, tokens);
    params.q = map_of(q, key_heads, tokens);
    params.d_o = map_of(d_o, heads, tokens);
    place_errors(problem, *this);
    params.dv = {map_of(dv, heads, tokens), dv.data(), heads * kHeadDim, kHeadDim};
    params.errors[0] = map_of(dq, key_heads, tokens);
    params.errors[1] = map_of(dk, key_heads, tokens);
    params.errors[2] =
        map_of(other_errors, std::max<std::int64_t>(heads - 2 * key_heads, 1), tokens);
    ready.assign(remade.chunks.size() * static_cast<std::size_t>(heads), gdn::cuda::kHalves);
    params.progress = {&items_taken, ready.data()};
    params.shape = {
        static_cast<std::int32_t>(tokens), static_cast<std::int32_t>(key_heads),
        static_cast<std::int32_t>(heads),  static_cast<std::int32_t>(remade.chunks.size()),
        static_cast<float>(problem.scale), problem.use_qk_l2norm};
    params.has_d_o = wanted.has_d_o;
    const void* betas = wanted.beta_is_bf16 ? static_cast<const void*>(beta_bf16.data())
                                            : static_cast<const void*>(beta.data());
    const std::int64_t token_stride = wanted.heads_first ? 1 : heads;
    const std::int64_t head_stride = wanted.heads_first ? tokens : 1;
    params.gates = {g.data(), token_stride, head_stride, betas, heads, 1, wanted.beta_is_bf16};
    params.r_k = r_k.data();
    params.r_q = r_q.data();
    params.chunks = remade.chunks.data();
    params.inverse = remade.images.inverses.data();
    params.largest = remade.largest.data();
    params.largest_gradients = remade.largest_gradients.data();
    params.state = remade.images.states.data();
    params.state_gradient = remade.images.state_gradients.data();
    params.dq = dq.data();
    params.dk = dk.data();
    params.dg = dg.data();
    params.dbeta = dbeta.data();
    params.dg_token_stride = token_stride;
    params.dg_head_stride = head_stride;
    params.dbeta_token_stride = heads;
    params.dbeta_head_stride = 1;
}

void Launch::run(std::uint32_t blocks, std::uint64_t seed) {
    const auto input = [](const auto& x) {
        return simt::Buffer{x.data(), x.size() * sizeof(x[0]), false};
    };
    const auto output = [](const auto& x) {
        return simt::Buffer{x.data(), x.size() * sizeof(x[0]), true};
    };
    const Images& images = remade.images;
    const auto items = static_cast<std::uint32_t>(params.shape.num_chunks * params.shape.key_heads);
    simt::launch({.blocks = std::min(blocks, items),
                  .threads = GradientsConfig::kThreads,
                  .shared_bytes = GradientsConfig::kSharedBytes,
                  .seed = seed,
                  .buffers = {input(q),
                              input(k),
                              input(d_o),
                              input(beta_bf16),
                              input(g),
                              input(beta),
                              input(r_k),
                              input(r_q),
                              input(remade.chunks),
                              output(other_errors),
                              input(ready),
                              {&items_taken, sizeof(items_taken), true},
                              input(remade.largest),
                              input(remade.largest_gradients),
                              input(images.inverses),
                              input(images.states),
                              input(images.state_gradients),
                              output(dq),
                              output(dk),
                              output(dv),
                              output(dg),
                              output(dbeta)}},
                 [&] { gdn::cuda::gradients_kernel<GradientsConfig>(params); });
}

at::Tensor tensor_of(const std::vector<std::uint16_t>& bits, at::IntArrayRef shape) {
    at::Tensor x = at::empty(shape, at::kDouble);
    std::transform(bits.begin(), bits.end(), x.mutable_data_ptr<double>(),
                   [](std::uint16_t value) { return double{simt::bf16_value(value)}; });
    return x;
}
at::Tensor tensor_of(const std::vector<float>& values, at::IntArrayRef shape) {
    at::Tensor x = at::empty(shape, at::kDouble);
    std::copy(values.begin(), values.end(), x.mutable_data_ptr<double>());
    return x;
}

Tensors Launch::results() const {
    const std::int64_t tokens = params.shape.tokens, heads = params.shape.value_heads;
    const std::int64_t key_heads = params.shape.key_heads;
    return {
        {"dq", tensor_of(dq, {tokens, key_heads, kHeadDim})},
        {"dk", tensor_of(dk, {tokens, key_heads, kHeadDim})},
        {"dv", tensor_of(dv, {tokens, heads, kHeadDim})},
        {"dg", heads_first ? tensor_of(dg, {heads, tokens}).t() : tensor_of(dg, {tokens, heads})},
        {"dbeta", tensor_of(dbeta, {tokens, heads})}};
}

/// By head; one whose reference is next to nothing counts against 1e-4 of the largest.
double worst_error(const at::Tensor& x, const at::Tensor& reference) {
    const at::Tensor error = (x - reference).transpose(0, 1).flatten(1).norm(2, 1);
    const at::Tensor norm = reference.transpose(0, 1).flatten(1).norm(2, 1);
    if (x.size(0) < 4 && x.dim() == 2) {  // a head has a few numbers, some of which cancel
        return error.norm().item<double>() / norm.norm().item<double>();
    }
    const double most = std::max(norm.max().item<double>(), 1e-30);
    const at::Tensor allowed = norm.clamp_min(1e-4 * most);
    const double worst = (error / allowed).max().item<double>();
    return std::isfinite(worst) ? worst : INFINITY;
}

void expect_gradients(const GradientsCase& wanted,
                      const Tensors& results,
                      const GdnGradients& all) {
    using gdn::cuda::kFp16;  // dq, dk and dv are rounded to bf16
    const std::map<std::string, std::pair<at::Tensor, double>> expected = {
        {"dq", {all.dq, kFp16 ? 2.5e-3 : 5e-3}},
        {"dk", {all.dk, kFp16 ? 2.5e-3 : 6e-3}},
        {"dv", {all.dv, kFp16 ? 2.5e-3 : 5e-3}},
        {"dg", {all.dg, kFp16 ? 2e-3 : wanted.bf16_dg_bar}},
        {"dbeta", {all.dbeta, kFp16 ? 2e-3 : 6e-3}},
    };
    for (std::size_t s = 0; s + 1 < wanted.offsets.size(); ++s) {
        const auto first = wanted.offsets[s], count = wanted.offsets[s + 1] - first;
        if (static_cast<std::int64_t>(s) == wanted.poisoned || count == 0) {
            continue;
        }
        for (const auto& [name, given] : expected) {
            const double error = worst_error(results.at(name).narrow(0, first, count),
                                             given.first.narrow(0, first, count));
            EXPECT_LE(error, given.second) << wanted.name << ": " << name << ", segment " << s;
        }
    }
    if (wanted.padding > 0) {
        for (const auto& [name, x] : results) {
            EXPECT_TRUE(
                x.narrow(0, wanted.offsets.back(), wanted.padding).isnan().all().item<bool>())
                << name << " is written beyond the last segment";
        }
    }
}

class Gradients : public ::testing::TestWithParam<GradientsCase> {};

TEST_P(Gradients, AreThoseOfTheReference) {
    GradientsCase wanted = GetParam();
    for (int run = 0; run < 2; ++run, ++wanted.seed) {
        const GradientsProblem problem = make_problem(wanted);
        Launch launch(wanted, problem);
        launch.run(wanted.blocks, wanted.seed);
        const Tensors results = launch.results();
        expect_gradients(wanted, results, reference_gradients(problem));
        if (wanted.gates == Gates::kWithReset) {
            EXPECT_EQ(results.at("dg")[problem.d_o.size(0) / 3].abs().max().item<double>(), 0.0);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(
    Cases,
    Gradients,
    ::testing::Values(
        GradientsCase{.name = "OneToken", .offsets = {0, 1}, .key_heads = 4, .group = 2},
        GradientsCase{.name = "OneChunk", .offsets = {0, 64}},
        GradientsCase{.name = "ShortChunk", .offsets = {0, 63}, .padding = 3},
        GradientsCase{.name = "ChunkAndToken", .offsets = {0, 65}, .blocks = 1, .seed = 2},
        GradientsCase{.name = "FourChunks", .offsets = {0, 200}, .group = 2, .blocks = 1},
        GradientsCase{.name = "Packed",
                      .offsets = {0, 40, 40, 104, 150},
                      .key_heads = 2,
                      .group = 1,
                      .beta_is_bf16 = true,
                      .padding = 2,
                      .seed = 3},
        GradientsCase{.name = "PoisonedNeighbour",
                      .offsets = {0, 70, 100, 200},
                      .group = 2,
                      .poisoned = 1,
                      .padding = 1,
                      .blocks = 1,
                      .seed = 4},
        GradientsCase{.name = "GroupOfThree", .offsets = {0, 128}, .group = 3, .blocks = 1},
        GradientsCase{.name = "ItemsOfThreeTurns",
                      .offsets = {0, 64, 65, 100},
                      .key_heads = 2,
                      .group = 3,
                      .beta_is_bf16 = true,
                      .padding = 1,
                      .blocks = 1,
                      .seed = 5},
        GradientsCase{.name = "GroupOfFive", .offsets = {0, 70}, .group = 5, .blocks = 1},
        GradientsCase{.name = "GroupOfFour", .offsets = {0, 90}, .group = 4, .blocks = 1},
        GradientsCase{.name = "GroupOfEight", .offsets = {0, 60}, .group = 8, .bf16_dg_bar = 9e-3},
        GradientsCase{.name = "NoDecay",
                      .offsets = {0, 128},
                      .key_heads = 3,
                      .gates = Gates::kNone,
                      .blocks = 1,
                      .bf16_dg_bar = 1.1e-2},
        GradientsCase{.name = "StrongDecay", .offsets = {0, 120}, .gates = Gates::kStrong},
        GradientsCase{.name = "MixedDecay", .offsets = {0, 128}, .gates = Gates::kMixed},
        GradientsCase{.name = "Reset", .offsets = {0, 128}, .gates = Gates::kWithReset},
        GradientsCase{.name = "UnitKeys", .offsets = {0, 100}, .use_qk_l2norm = false},
        GradientsCase{.name = "HeadsFirst", .offsets = {0, 70}, .group = 3, .heads_first = true},
        GradientsCase{.name = "NoOutputGradient",
                      .offsets = {0, 70, 134},
                      .group = 2,
                      .has_d_o = false,
                      .blocks = 1},
        GradientsCase{.name = "TinyGradientsLargeValues",
                      .offsets = {0, 100},
                      .group = 2,
                      .value_size = 1e3,
                      .gradient_size = 1e-7},
        GradientsCase{.name = "HugeGradientsTinyValues",
                      .offsets = {0, 100},
                      .gates = Gates::kNone,
                      .value_size = 1e-20,
                      .gradient_size = 1e20},
        GradientsCase{.name = "HeadsOfDifferentSize",
                      .offsets = {0, 70},
                      .group = 3,
                      .blocks = 1,
                      .head_step = 12},
        GradientsCase{.name = "NoStates", .offsets = {0, 100}, .has_states = false}),
    [](const auto& test) { return test.param.name; });

TEST(GradientsOrder, DoesNotChangeABit) {
    const GradientsCase wanted = {.name = "order", .offsets = {0, 130}, .group = 2, .blocks = 1};
    const GradientsProblem problem = make_problem(wanted);
    Launch first(wanted, problem);
    first.run(1, 1);
    for (std::uint64_t seed = 2; seed < 5; ++seed) {
        Launch again(wanted, problem);
        again.run(seed % 2 == 0 ? 3 : 2, seed);
        EXPECT_EQ(again.dq, first.dq);
        EXPECT_EQ(again.dk, first.dk);
        EXPECT_EQ(again.dv, first.dv);
        EXPECT_EQ(again.dg, first.dg);
        EXPECT_EQ(again.dbeta, first.dbeta);
    }
}

}  // namespace
}  // namespace hybridcp::test
