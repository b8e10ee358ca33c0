// What the plan of memory must know of the fused backend.
#pragma once

#include <cstdint>

namespace hybridcp {

/// Tokens of a chunk of the fused backend on this CPU with the selected instruction set, for inputs
/// in fp32 or bf16: it keeps two squares of so many tokens for each.
[[nodiscard]] std::int64_t fused_gdn_chunk(bool is_fp32);

}  // namespace hybridcp
