// How much causal attention a layout gives to each rank.
#pragma once

#include <cstdint>

#include "hybridcp/layout.h"

namespace hybridcp {

/// So many tokens are counted exactly in 64 bits, whatever the documents.
inline constexpr std::int64_t kMaxCausalTokens = 0xFFFFFFFF;

/// The keys that the tokens of `rank` see under causal attention: the sum of position + 1.
/// Errors: UsageError for a layout of more than kMaxCausalTokens.
[[nodiscard]] std::int64_t causal_work(const Layout& layout, int rank);

}  // namespace hybridcp
