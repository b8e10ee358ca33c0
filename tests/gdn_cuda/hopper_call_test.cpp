// The Hopper kernels from inputs to gradients, in the emulator, by the rules of the fused backend.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "gdn_cuda/emulated_call.h"
#include "kernels/gdn_fused_check.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

std::vector<FusedVariant> emulated(int pieces, std::uint64_t seed) {
    return {{"emulated", [=](const GdnCase& c) {
                 return make_emulated_call(c.inputs, c.offsets, c.options, pieces, seed);
             }}};
}

GdnCase bf16_case(const std::vector<std::int64_t>& offsets,
                  std::int64_t key_heads,
                  std::int64_t value_heads,
                  std::uint64_t seed) {
    return with_dtype(
        generated_case({offsets, offsets.back(), key_heads, value_heads, 128, 128}, seed),
        at::kBFloat16);
}

const std::map<std::string, double> kBars{{"dk", 6e-3}, {"dbeta", 6e-3}, {"dg", 8e-3}};
constexpr double kBar = 5e-3;

TEST(HopperCall, SegmentsOfSeveralChunks) {
    for (const std::int64_t group : {1, 2, 4}) {
        const GdnCase c =
            bf16_case({0, 300, 300, 413}, 1, group, 20 + static_cast<uint64_t>(group));
        SCOPED_TRACE(group);
        expect_close(run_all(*emulated(2, 3)[0].make_call(c), c),
                     run_all(GdnBackend::kReference, with_dtype(c, at::kDouble)), kBars, kBar);
    }
}

TEST(HopperCall, GeneratedCases) {
    const auto cases = fused_cases({{128, 128}});
    BarCount count;
    for (std::size_t n = 0; n < cases.size(); n += 19) {
        const GdnCase& c = cases[n].gdn_case;
        if (cases[n].regime->bf16 && c.d_o.defined() && c.options.scale != 0.0 &&
            c.inputs.v.size(1) <= 4) {
            check_bf16(cases[n], emulated(1, n), count,
                       {.emulations = cuda_emulations(), .luck = 4.0});
        }
    }
    EXPECT_LE(count.unlucky, count.all / 50 + 2) << count.all;
}

}  // namespace
}  // namespace hybridcp::test
