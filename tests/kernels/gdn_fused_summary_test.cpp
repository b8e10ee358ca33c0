// Segment summaries of the fused backend: against the reference, as exact identities with forward
// and backward, and the chunks that strongly decaying heads leave out.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "kernels/gdn_fused_cases.h"
#include "kernels/gdn_fused_check.h"
#include "kernels/gdn_fused_variants.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

struct Bars {
    double states;
    double identities;
};
constexpr Bars kFp32{1e-5, 1e-5};
constexpr Bars kBf16{5e-3, 1e-2};  // an identity has the errors of both sides

/// By segment: a large one would hide a small one.
void expect_close_by_segment(const std::string& name,
                             const Tensor& actual,
                             const Tensor& expected,
                             double bar) {
    for (std::int64_t i = 0; i < expected.size(0); ++i) {
        EXPECT_LE(generated_error(actual.narrow(0, i, 1), expected.narrow(0, i, 1)), bar)
            << name << " of segment " << i;
    }
}

void check_summaries(const GdnCase& gdn_case,
                     const std::vector<FusedVariant>& variants,
                     const Bars& bars) {
    const GdnCase wide = with_dtype(gdn_case, at::kDouble);
    const auto reference =
        make_gdn_call(GdnBackend::kReference, wide.inputs, wide.offsets, wide.options);
    const GdnSummary expected = reference->summary();
    (void)reference->forward(wide.S_start);
    const Tensor expected_dS = reference->gradient_summary(wide.d_o);
    for (const FusedVariant& variant : variants) {
        SCOPED_TRACE(variant.name);
        const auto call = variant.make_call(gdn_case);
        const auto [S, M] = call->summary();
        const Tensors all = run_all(*call, gdn_case);
        const Tensor dS = call->gradient_summary(gdn_case.d_o);
        expect_close_by_segment("S", S, expected.S, bars.states);
        expect_close_by_segment("M", M, expected.M, bars.states);
        expect_close_by_segment("dS", dS, expected_dS, bars.states);
        const Tensor end = at::matmul(M, gdn_case.S_start) + S;
        const Tensor d_start = at::matmul(M.mT(), gdn_case.dS_end) + dS;
        expect_close_by_segment("M S_start + S", end, all.at("S_end"), bars.identities);
        expect_close_by_segment("M^T dS_end + dS", d_start, all.at("dS_start"), bars.identities);
        EXPECT_EQ(call->gradient_summary(Tensor()).count_nonzero().item<std::int64_t>(), 0);
    }
}

TEST(GdnFusedSummary, MatchesReferenceAndForward) {
    const std::vector<GdnShape> shapes = {{{0, 0, 1, 34, 34, 98, 130}, 133, 1, 2, 32, 32},
                                          {{0, 33, 97}, 97, 2, 6, 40, 24},
                                          {{0, 64}, 64, 1, 1, 24, 100},
                                          {{0, 31, 70}, 70, 1, 2, 128, 128},
                                          {{0, 65}, 65, 1, 8, 64, 32},
                                          {{0, 300}, 300, 1, 2, 32, 64}};
    for (const GdnRegime& regime : gdn_regimes()) {
        // Keys that cancel have bars of their own, and -50 a token leaves no state to compare.
        if (regime.correlated || !regime.bf16) {
            continue;
        }
        const std::size_t i = static_cast<std::size_t>(&regime - gdn_regimes().data());
        GdnCase gdn_case = generated_case(shapes[i % shapes.size()], 40 + i);
        regime.apply(gdn_case);
        SCOPED_TRACE(regime.name);
        check_summaries(gdn_case, fused_variants(), kFp32);
        check_summaries(with_dtype(gdn_case, at::kBFloat16), fused_bf16_variants(), kBf16);
    }
}

/// Segments of 0, 300 and 40 tokens; heads from no decay to resets.
GdnCase decaying_case() {
    GdnCase c = generated_case({{0, 0, 300, 340}, 345, 2, 6, 32, 24}, 61);
    const std::vector<double> gates = {0.0, -0.2, -2.0, -0.09, -30.0, -0.001};
    for (std::size_t head = 0; head < gates.size(); ++head) {
        c.inputs.g.select(1, static_cast<std::int64_t>(head)).fill_(gates[head]);
    }
    c.inputs.g[150][0] = -std::numeric_limits<float>::infinity();
    c.inputs.g[299][5] = -std::numeric_limits<float>::infinity();  // at the very end
    c.inputs.g[300][3] = -std::numeric_limits<float>::infinity();  // at the very start
    return c;
}

struct Summaries {
    Tensor S, M, dS;
    std::vector<bool> independent;
};

Summaries summaries(const FusedVariant& variant, const GdnCase& gdn_case, double floor) {
    GdnCase c = gdn_case;
    c.options.summary_floor = floor;
    const auto call = variant.make_call(c);
    const GdnSummary summary = call->summary();
    (void)call->forward(c.S_start);
    return {summary.S, summary.M, call->gradient_summary(c.d_o), *call->independent()};
}

TEST(GdnFusedSummary, UnevenGates) {
    for (const FusedVariant& variant : fused_bf16_variants()) {
        SCOPED_TRACE(variant.name);
        check_uneven_summaries(variant);
    }
}

TEST(GdnFusedSummary, WindowsLeaveOutWhatHasDecayed) {
    constexpr double kAll = -std::numeric_limits<double>::infinity();
    const GdnCase fp32 = decaying_case();
    for (const GdnCase& gdn_case : {fp32, with_dtype(fp32, at::kBFloat16)}) {
        for (const FusedVariant& variant : fused_bf16_variants()) {
            SCOPED_TRACE(variant.name);
            const Summaries all = summaries(variant, gdn_case, kAll);
            const Summaries exact = summaries(variant, gdn_case, GdnOptions::kExactSummary);
            const Summaries fast = summaries(variant, gdn_case, GdnOptions::kFastSummary);
            EXPECT_TRUE(at::equal(exact.S, all.S));
            EXPECT_TRUE(at::equal(exact.M, all.M));
            EXPECT_TRUE(at::equal(exact.dS, all.dS));
            EXPECT_LE(worst_head_error(fast.S, all.S), 1e-6);
            EXPECT_LE(worst_head_error(fast.dS, all.dS), 1e-6);
            EXPECT_LE((fast.M - all.M).abs().max().item<double>(), 2e-11);  // e^-25
        }
    }
}

TEST(GdnFusedSummary, IndependentHeadsHaveNoMap) {
    const GdnCase gdn_case = decaying_case();
    // Segments by heads. 300 tokens of -0.09 sum to -27.
    const std::vector<bool> exact = {false, false, false, false, false, false,   // empty
                                     true,  false, true,  false, true,  true,    // 300 tokens
                                     false, false, false, true,  true,  false};  // 40
    std::vector<bool> fast = exact;
    fast[6 + 1] = fast[6 + 3] = fast[12 + 2] = true;
    for (const FusedVariant& variant : fused_variants()) {
        SCOPED_TRACE(variant.name);
        for (const auto& [floor, expected] : {std::pair{GdnOptions::kExactSummary, exact},
                                              std::pair{GdnOptions::kFastSummary, fast}}) {
            const Summaries actual = summaries(variant, gdn_case, floor);
            EXPECT_EQ(actual.independent, expected);
            const Tensor maps = actual.M.flatten(0, 1);
            for (std::size_t i = 0; i < expected.size(); ++i) {
                const bool zero =
                    maps[static_cast<std::int64_t>(i)].count_nonzero().item<std::int64_t>() == 0;
                EXPECT_EQ(zero, static_cast<bool>(expected[i])) << i;
            }
        }
        // The bound holds for unit keys only: without l2norm nothing is left out.
        GdnCase raw = gdn_case;
        raw.options.use_qk_l2norm = false;
        raw.inputs.k = raw.inputs.k * 0.1;
        const Summaries actual = summaries(variant, raw, GdnOptions::kFastSummary);
        EXPECT_EQ(actual.independent, std::vector<bool>(18, false));
    }
}

}  // namespace
}  // namespace hybridcp::test
