// Generated problems for the fused Gated DeltaNet, by tables.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/gdn_support.h"

namespace hybridcp::test {

/// How gates, beta and keys are drawn.
struct GdnRegime {
    std::string name;
    std::function<void(GdnCase&)> apply;  // to a case of generated_case
    bool correlated = false;              // keys: bars C of the accuracy table, else N
    bool bf16 = true;                     // the bf16 bars are for unit keys that differ
    bool decays_at_once = false;          // next to nothing reaches the next token
};
[[nodiscard]] const std::vector<GdnRegime>& gdn_regimes();

struct FusedCase {
    GdnCase gdn_case;
    const GdnRegime* regime;
};

using HeadDims = std::pair<std::int64_t, std::int64_t>;  // K, V

/// Every pair of regime, lengths, head dims, group and variation (strides, states, scale) occurs.
[[nodiscard]] std::vector<FusedCase> fused_cases();
/// The same with these head dims only.
[[nodiscard]] std::vector<FusedCase> fused_cases(const std::vector<HeadDims>& dims);
/// Segments over several checkpoints of the backward pass, 1000 and 4097 tokens, the largest dims
/// and groups.
[[nodiscard]] std::vector<FusedCase> long_fused_cases();

/// The same values as slices of wider tensors and with other strides.
[[nodiscard]] GdnCase strided(const GdnCase& gdn_case);

/// 1e-5, or 1e-4 where the log decays of 32 tokens in a row of a segment sum to less than -100.
/// Correlated keys: 1e-5.
[[nodiscard]] double fused_fp32_bar(const FusedCase& problem);

}  // namespace hybridcp::test
