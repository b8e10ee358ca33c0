// All backends against the golden cases, outputs and the gradient of every input by head. The bars
// are those of the golden data's README, section 8.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "kernels/gdn_fused_variants.h"
#include "kernels/gdn_support.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

class GdnGolden : public testing::TestWithParam<std::string> {
  protected:
    void compare(Tensors actual,
                 const GdnCase& gdn_case,
                 const std::map<std::string, double>& bars,
                 double bar) {
        Tensors expected = gdn_case.expected;
        split_extreme_rows(gdn_case, actual);
        split_extreme_rows(gdn_case, expected);
        expect_close(actual, expected, bars, bar);
        const Tensor reset = gdn_case.inputs.g.isinf();
        EXPECT_EQ(actual.at("dg").masked_select(reset).count_nonzero().item<std::int64_t>(), 0);
    }
};

TEST_P(GdnGolden, Reference) {
    const GdnCase gdn_case = golden_case(GetParam());
    compare(run_all(GdnBackend::kReference, gdn_case), gdn_case, {}, 1e-6);
}

double fp32_bar(const std::string& name) {
    return name == "strong_mixed" || name == "collinear" ? 5e-5 : 1e-5;
}

std::map<std::string, double> fp32_bars(const std::string& name) {
    return name == "strong_chain" ? std::map<std::string, double>{{"dg", 1e-4}}
                                  : std::map<std::string, double>{};
}

TEST_P(GdnGolden, Eager) {
    const std::string name = GetParam();
    for (const std::int64_t chunk_size : {64, 32}) {
        GdnCase gdn_case = golden_case(name);
        gdn_case.options.chunk_size = chunk_size;
        compare(run_all(GdnBackend::kEager, gdn_case), gdn_case, fp32_bars(name), fp32_bar(name));
    }
}

TEST_P(GdnGolden, Fused) {
    const std::string name = GetParam();
    const GdnCase gdn_case = golden_case(name);
    for (const FusedVariant& variant : fused_variants()) {
        SCOPED_TRACE(variant.name);
        compare(run_all(*variant.make_call(gdn_case), gdn_case), gdn_case, fp32_bars(name),
                fp32_bar(name));
    }
}

TEST_P(GdnGolden, EagerInFp64) {
    GdnCase gdn_case = with_dtype(golden_case(GetParam()), at::kDouble);
    compare(run_all(GdnBackend::kEager, gdn_case), gdn_case, {}, 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Cases,
                         GdnGolden,
                         testing::ValuesIn(golden_case_names()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace hybridcp::test
