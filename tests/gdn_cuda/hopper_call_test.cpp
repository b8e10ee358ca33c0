// The Hopper backend from inputs to gradients, its kernels in the emulator, by the rules of the
// fused backend.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "gdn_cuda/emulated_launch.h"
#include "kernels/gdn/backends.h"
#include "kernels/gdn_fused_check.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

std::vector<FusedVariant> emulated(std::uint64_t seed, const gdn::CudaLimits& limits = {}) {
    return {{"emulated", [=](const GdnCase& c) {
                 set_emulated_seed(seed);
                 return gdn::make_cuda_call(gdn::make_problem(c.inputs, c.offsets, c.options),
                                            limits);
             }}};
}

const std::map<std::string, double> kBars{{"dk", 6e-3}, {"dbeta", 6e-3}, {"dg", 8e-3}};
constexpr double kBar = 5e-3;

TEST(HopperCall, SegmentsOfSeveralChunks) {
    for (const std::int64_t group : {1, 2, 4}) {
        const GdnCase c =
            bf16_case({0, 300, 300, 413}, 1, group, 20 + static_cast<uint64_t>(group));
        SCOPED_TRACE(group);
        expect_close(run_all(*emulated(3)[0].make_call(c), c),
                     run_all(GdnBackend::kReference, with_dtype(c, at::kDouble)), kBars, kBar);
    }
}

TEST(HopperCall, PartsOfHeadsAreTheWhole) {
    GdnCase c = strided(bf16_case({0, 70, 135}, 3, 6, 9));
    c.inputs.g = c.inputs.g.to(at::kFloat);
    int launches = emulated_launches();
    const auto whole = emulated(4)[0].make_call(c);
    const Tensors expected = run_all(*whole, c);
    EXPECT_EQ(emulated_launches() - launches, 4);  // forward, again, state gradient, gradients
    for (const std::int64_t bytes : {1, 2 * 2 * 3 * 106496}) {  // one key head at once, and two
        launches = emulated_launches();
        const auto call = emulated(5, {.image_bytes = bytes})[0].make_call(c);
        const Tensors actual = run_all(*call, c);
        EXPECT_EQ(emulated_launches() - launches, 1 + 3 * (bytes == 1 ? 3 : 2));
        for (const auto& [name, x] : expected) {
            EXPECT_TRUE(at::equal(actual.at(name), x)) << name;
        }
        EXPECT_TRUE(at::equal(call->gradient_summary(c.d_o), whole->gradient_summary(c.d_o)));
    }
}

// Segments of three runs and of one, a head at once; head 0 remembers all of its segment.
TEST(HopperCall, RunsBeginWithCheckpoints) {
    GdnCase c = bf16_case({0, 1030, 1060}, 2, 2, 31);
    c.inputs.g.select(1, 0).mul_(1e-3);
    expect_close(run_all(*emulated(8, {.image_bytes = 1})[0].make_call(c), c),
                 run_all(GdnBackend::kReference, with_dtype(c, at::kDouble)), kBars, kBar);
}

TEST(HopperCall, SmallerHeadDimsAndSummaries) {
    const GdnCase c = with_dtype(
        generated_case({{0, 0, 90, 100, 164, 230, 300}, 303, 1, 2, 40, 24}, 12), at::kBFloat16);
    const GdnCase wide = with_dtype(c, at::kDouble);
    const auto call = emulated(6)[0].make_call(c);
    const auto reference =
        make_gdn_call(GdnBackend::kReference, wide.inputs, wide.offsets, wide.options);
    const GdnSummary summary = call->summary(), expected = reference->summary();
    EXPECT_LE(worst_head_error(summary.S, expected.S), kBar);
    EXPECT_LE(worst_head_error(summary.M, expected.M), kBar);
    expect_close(run_all(*call, c), run_all(*reference, wide), kBars, kBar);
    EXPECT_LE(
        worst_head_error(call->gradient_summary(c.d_o), reference->gradient_summary(wide.d_o)),
        kBar);
}

// The first segment is walked in two parts; its head does not forget.
TEST(HopperCall, SummariesOfParts) {
    GdnCase c = bf16_case({0, 1000, 1020}, 1, 1, 17);
    c.inputs.g = c.inputs.g.to(at::kFloat) * 1e-3;
    c.inputs.beta = c.inputs.beta * 0.1;  // or nothing would be left of M
    const GdnCase wide = with_dtype(c, at::kDouble);
    const auto call = emulated(10, {.chunks_of_two_summary_parts = 8})[0].make_call(c);
    const auto reference =
        make_gdn_call(GdnBackend::kReference, wide.inputs, wide.offsets, wide.options);
    const GdnSummary summary = call->summary(), expected = reference->summary();
    EXPECT_LE(worst_head_error(summary.S, expected.S), kBar);
    EXPECT_LE(worst_head_error(summary.M, expected.M), kBar);
    (void)call->forward({});
    (void)reference->forward({});
    EXPECT_LE(
        worst_head_error(call->gradient_summary(c.d_o), reference->gradient_summary(wide.d_o)),
        kBar);
}

TEST(HopperCall, NoTokens) {
    for (const std::vector<std::int64_t>& offsets :
         {std::vector<std::int64_t>{0, 0, 0}, std::vector<std::int64_t>{0}}) {
        const GdnCase c = bf16_case(offsets, 1, 2, 13);
        const auto call = emulated(7)[0].make_call(c);
        const Tensors actual = run_all(*call, c);
        EXPECT_TRUE(at::equal(actual.at("S_end"), c.S_start));
        EXPECT_TRUE(at::equal(actual.at("dS_start"), c.dS_end));
        EXPECT_EQ(call->summary().S.count_nonzero().item<std::int64_t>(), 0);
        EXPECT_EQ(call->gradient_summary(c.d_o).count_nonzero().item<std::int64_t>(), 0);
    }
}

TEST(HopperCall, GeneratedCases) {
    const auto cases = fused_cases({{128, 128}});
    BarCount count;
    for (std::size_t n = 0; n < cases.size(); n += 19) {
        const GdnCase& c = cases[n].gdn_case;
        if (cases[n].regime->bf16 && c.d_o.defined() && c.options.scale != 0.0 &&
            c.inputs.v.size(1) <= 4) {
            check_bf16(cases[n], emulated(n), count,
                       {.emulations = cuda_emulations(), .luck = 4.0});
        }
    }
    EXPECT_LE(count.unlucky, count.all / 50 + 2) << count.all;
}

}  // namespace
}  // namespace hybridcp::test
