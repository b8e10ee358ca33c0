// The fused backend on every instruction set of this machine against the recurrence in fp64, on
// generated problems: fp32 and bf16 inputs, the latter also in the emulated bf16 arithmetic of
// other machines.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "kernels/gdn_fused_cases.h"
#include "kernels/gdn_fused_check.h"
#include "kernels/gdn_fused_variants.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

void check_fp32(FusedCase problem) {
    GdnCase& gdn_case = problem.gdn_case;
    SCOPED_TRACE(gdn_case.name);
    // Identical keys are the limit of the golden collinear case, with its bar.
    const bool identical = problem.regime->name == "identical keys";
    const double bar = identical ? 5e-5 : fused_fp32_bar(problem);
    Tensors expected = run_all(GdnBackend::kReference, gdn_case);
    split_extreme_rows(gdn_case, expected);
    const GdnCase clean = poison_padding(gdn_case);
    for (const FusedVariant& variant : fused_variants()) {
        SCOPED_TRACE(variant.name);
        Tensors actual = run_all(*variant.make_call(gdn_case), gdn_case);
        expect_exact_zeros(gdn_case, actual);
        split_extreme_rows(clean, actual);
        for (const auto& [name, reference] : expected) {
            // With identical keys and beta = 1 the true dg is nothing next to its terms.
            const bool by_head = name != "dg" || !identical;
            const auto prepared = [&](const Tensor& x) { return by_head ? x : x.reshape({-1, 1}); };
            EXPECT_LE(generated_error(prepared(actual.at(name)), prepared(reference)), bar) << name;
        }
    }
}

TEST(GdnFused, GeneratedFp32) {
    const auto cases = fused_cases();
    EXPECT_GE(cases.size(), 300U);
    for (const FusedCase& problem : cases) {
        check_fp32(problem);
    }
}

TEST(GdnFused, LongFp32) {
    for (const FusedCase& problem : long_fused_cases()) {
        check_fp32(problem);
    }
}

TEST(GdnFused, GeneratedBf16) {
    const auto cases = fused_cases();
    BarCount count;
    for (std::size_t n = cases.size() * 2 / 3; n < cases.size(); ++n) {  // all of each table
        const GdnCase& c = cases[n].gdn_case;
        if (cases[n].regime->bf16 && c.d_o.defined() && c.options.scale != 0.0) {
            check_bf16(cases[n], fused_bf16_variants(), count);
        }
    }
    for (const FusedCase& problem : long_fused_cases()) {
        if (problem.gdn_case.offsets.back() < 4000) {  // the emulation would be slow
            check_bf16(problem, fused_bf16_variants(), count);
        }
    }
    // Honest bf16 misses the bars by luck where few numbers make up a tensor, and nowhere else.
    EXPECT_LE(count.above, count.all / 10) << count.all;
}

}  // namespace
}  // namespace hybridcp::test
