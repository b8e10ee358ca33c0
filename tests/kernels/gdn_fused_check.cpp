#include "kernels/gdn_fused_check.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

namespace hybridcp::test {
namespace {

using at::Tensor;

const std::map<std::string, double>& bf16_bars(const GdnRegime& regime) {
    static const std::map<std::string, double> unit_keys = {
        {"dk", 6e-3}, {"dbeta", 6e-3}, {"dg", 8e-3}, {"", 5e-3}};
    static const std::map<std::string, double> correlated = {
        {"o", 2e-2},    {"S_end", 1e-2}, {"dq", 8e-3},         {"dk", 1.5e-2}, {"dv", 2e-2},
        {"dg", 1.5e-2}, {"dbeta", 2e-2}, {"dS_start", 1.2e-2}, {"", 2e-2}};
    return regime.correlated ? correlated : unit_keys;
}

}  // namespace

void expect_exact_zeros(const GdnCase& gdn_case, const Tensors& actual) {
    const std::int64_t end = gdn_case.offsets.back();
    for (const char* name : {"o", "dq", "dk", "dv", "dg", "dbeta"}) {
        const Tensor& x = actual.at(name);
        EXPECT_EQ(x.narrow(0, end, x.size(0) - end).count_nonzero().item<std::int64_t>(), 0)
            << name << " of the padding";
    }
    const Tensor reset = gdn_case.inputs.g.isinf();
    EXPECT_EQ(actual.at("dg").masked_select(reset).count_nonzero().item<std::int64_t>(), 0);
}

/// What stands in the padding must not matter. Strides stay; returns the case as it was.
GdnCase poison_padding(GdnCase& gdn_case) {
    GdnCase clean = gdn_case;
    const std::int64_t end = gdn_case.offsets.back();
    GdnInputs& in = gdn_case.inputs;
    clean.inputs.q = in.q.clone();
    clean.inputs.k = in.k.clone();
    for (const Tensor* x : {&in.q, &in.k, &in.v, &in.g, &in.beta, &gdn_case.d_o}) {
        if (x->defined()) {
            x->narrow(0, end, x->size(0) - end).fill_(std::numeric_limits<float>::quiet_NaN());
        }
    }
    return clean;
}

void check_bf16(const FusedCase& problem,
                const std::vector<FusedVariant>& variants,
                BarCount& count,
                const Bf16Rule& rule) {
    constexpr double kFp32Rounding = 1e-5;  // where nothing is rounded to bf16
    GdnCase gdn_case = with_dtype(problem.gdn_case, at::kBFloat16);
    SCOPED_TRACE(gdn_case.name);
    Tensors expected = run_all(GdnBackend::kReference, with_dtype(gdn_case, at::kDouble));
    split_extreme_rows(gdn_case, expected);
    const auto yardstick = bf16_yardstick(gdn_case, expected, generated_error, rule.emulations);
    const auto& bars = bf16_bars(*problem.regime);
    const GdnCase clean = poison_padding(gdn_case);
    for (const FusedVariant& variant : variants) {
        SCOPED_TRACE(variant.name);
        Tensors actual = run_all(*variant.make_call(gdn_case), gdn_case);
        expect_exact_zeros(gdn_case, actual);
        split_extreme_rows(clean, actual);
        for (const auto& [name, reference] : expected) {
            const double error = generated_error(actual.at(name), reference);
            const double honest = yardstick.at(name);
            EXPECT_LE(error, 1.5 * honest + kFp32Rounding) << name << ", the emulation";
            const double bar = bars.contains(name) ? bars.at(name) : bars.at("");
            count.all += 1;
            count.above += honest > bar ? 1 : 0;
            if (honest <= bar || rule.beyond_bf16) {
                EXPECT_LE(error, bar) << name << ", the emulation's is " << honest;
            }
        }
    }
}

GdnCase uneven_case(std::int64_t tokens) {
    GdnCase c = bf16_case({0, tokens, tokens + 20}, 1, 5, 17);
    Tensor& g = c.inputs.g;
    g = g.to(at::kFloat) * 1e-3;
    g.select(1, 1).fill_(-0.2);
    g.select(1, 2).fill_(-0.06);
    g.select(1, 3).slice(0, tokens / 2).fill_(-0.2);
    g.select(1, 4).slice(0, 0, tokens / 2).fill_(-0.2);
    return c;
}

void check_uneven_summaries(const FusedVariant& variant) {
    GdnCase c = uneven_case(1000);
    c.inputs.beta = c.inputs.beta * 0.1;  // or nothing would be left of M
    c.options.summary_floor = GdnOptions::kFastSummary;
    const auto call = variant.make_call(c);
    const GdnCase wide = with_dtype(c, at::kDouble);
    const auto reference =
        make_gdn_call(GdnBackend::kReference, wide.inputs, wide.offsets, wide.options);
    const GdnSummary summary = call->summary(), expected = reference->summary();
    constexpr double kBar = 5e-3;
    EXPECT_LE(worst_head_error(summary.S, expected.S), kBar);
    const auto first = [](const Tensor& x) { return x.slice(1, 0, 1); };  // others leave nothing
    EXPECT_LE(worst_head_error(first(summary.M), first(expected.M)), kBar);
    EXPECT_LE((summary.M - expected.M).abs().max().item<double>(), 1e-3);
    (void)call->forward({});
    (void)reference->forward({});
    EXPECT_LE(
        worst_head_error(call->gradient_summary(c.d_o), reference->gradient_summary(wide.d_o)),
        kBar);
}

}  // namespace hybridcp::test
