// All four Hopper kernels one after the other in the emulator, behind the contract that the backend
// on a GPU fulfils: what they leave for each other, and the answer.
#pragma once

#include <memory>

#include "kernels/gdn/gdn.h"

namespace hybridcp::test {

/// bf16 q, k, v and d_o, fp32 g, K = V = 128, on the CPU. `seed` of the emulator's schedule.
[[nodiscard]] std::shared_ptr<GdnCall> make_emulated_call(const GdnInputs& inputs,
                                                          const std::vector<std::int64_t>& offsets,
                                                          const GdnOptions& options,
                                                          int pieces = 1,
                                                          std::uint64_t seed = 1);

}  // namespace hybridcp::test
