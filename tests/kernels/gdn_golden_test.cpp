// Both backends against the golden cases, outputs and the gradient of every input by head. The bars
// are those of the golden data's README, section 8.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "kernels/gdn_support.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

class GdnGolden : public testing::TestWithParam<std::string> {
  protected:
    void compare(GdnBackend backend,
                 const GdnCase& gdn_case,
                 const std::map<std::string, double>& bars,
                 double bar) {
        Tensors actual = run_all(backend, gdn_case);
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
    compare(GdnBackend::kReference, gdn_case, {}, 1e-6);
}

TEST_P(GdnGolden, Eager) {
    const std::string name = GetParam();
    const double bar = name == "strong_mixed" || name == "collinear" ? 5e-5 : 1e-5;
    std::map<std::string, double> bars;
    if (name == "strong_chain") {
        bars["dg"] = 1e-4;
    }
    for (const std::int64_t chunk_size : {64, 32}) {
        GdnCase gdn_case = golden_case(name);
        gdn_case.options.chunk_size = chunk_size;
        compare(GdnBackend::kEager, gdn_case, bars, bar);
    }
}

TEST_P(GdnGolden, EagerInFp64) {
    GdnCase gdn_case = with_dtype(golden_case(GetParam()), at::kDouble);
    compare(GdnBackend::kEager, gdn_case, {}, 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Cases,
                         GdnGolden,
                         testing::ValuesIn(golden_case_names()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace hybridcp::test
