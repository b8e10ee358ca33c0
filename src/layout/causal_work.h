// How much causal attention a layout gives to each rank.
#pragma once

#include <cstdint>

#include "hybridcp/layout.h"

namespace hybridcp {

/// The keys that the tokens of `rank` see under causal attention: the sum of position + 1.
/// Errors: UsageError for 2^32 tokens or more, whose sum might not fit 64 bits.
[[nodiscard]] std::int64_t causal_work(const Layout& layout, int rank);

}  // namespace hybridcp
