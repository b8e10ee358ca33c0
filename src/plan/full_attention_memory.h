#pragma once

#include "plan/block_memory.h"

namespace hybridcp::plan {

[[nodiscard]] std::unique_ptr<Half> make_full_attention_half(Book& book);

}  // namespace hybridcp::plan
