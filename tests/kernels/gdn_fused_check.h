// How a fused variant is judged on a generated problem in bf16.
#pragma once

#include "kernels/gdn_bf16_emulation.h"
#include "kernels/gdn_fused_cases.h"
#include "kernels/gdn_fused_variants.h"

namespace hybridcp::test {

/// Padding and the gates' gradients at resets are exactly zero.
void expect_exact_zeros(const GdnCase& gdn_case, const Tensors& actual);

/// What stands in the padding must not matter: NaN from here on. Strides stay; returns the case as
/// it was.
[[nodiscard]] GdnCase poison_padding(GdnCase& gdn_case);

/// How many comparisons there were, and in how many the yardstick itself missed the bar.
struct BarCount {
    int all = 0;
    int above = 0;
};

/// What a variant is held against.
struct Bf16Rule {
    std::vector<EmulationOptions> emulations = cpu_emulations();
    /// Within the bars where honest arithmetic in bf16 is not, too.
    bool beyond_bf16 = false;
};

/// Each variant within 1.5 times the error of honest bf16 arithmetic, and within the bars where
/// that is.
void check_bf16(const FusedCase& problem,
                const std::vector<FusedVariant>& variants,
                BarCount& count,
                const Bf16Rule& rule = {});

/// Segments of `tokens` and 20 in bf16: one head forgets nothing, others do within a few chunks, or
/// in one half of their segment alone.
[[nodiscard]] GdnCase uneven_case(std::int64_t tokens);
/// Summaries of it, of 1,000 tokens, fast as context parallelism asks for them.
void check_uneven_summaries(const FusedVariant& variant);

}  // namespace hybridcp::test
