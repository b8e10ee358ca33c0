// Launches of the forward kernel in the emulator, on poisoned outputs, for its tests.
#pragma once

#include <limits>

#include "gdn_cuda/operands.h"
#include "gdn_cuda/support.h"
#include "kernels/gdn/cuda/head_scale.cuh"

namespace hybridcp::test {

// Operands in fp16 have 11 bits for 8; o is rounded to bf16.
constexpr double kForwardBar = gdn::cuda::kFp16 ? 1e-3 : 5e-3;
constexpr double kOutputBar = gdn::cuda::kFp16 ? 2.5e-3 : 5e-3;

/// How segments are cut and what else a launch is told.
struct Run {
    int pieces = 1;
    int runs = 1;  // of the longest segment
    int kept = 0;  // chunks of each run that a keeping forward keeps; 0: all
    bool may_truncate = false;
    std::uint64_t seed = 1;
    float summary_floor = -std::numeric_limits<float>::infinity();
};

/// H in fp32 and T in fp64: [heads, chunks, ...] in panels of 64 x 64. E in fp32: [T, heads, 128].
struct Images {
    at::Tensor states, errors, inverses;
};
struct Forward {
    at::Tensor o, S_end, q_norms, k_norms, checkpoints;
    Images images;  // where they are kept
};
[[nodiscard]] Forward run_forward(const GdnProblem& problem, const Run& run);
[[nodiscard]] Forward run_keeping_forward(const GdnProblem& problem, const Run& run);
/// From the checkpoints of run_forward.
[[nodiscard]] Images run_remake(const GdnProblem& problem, const Run& run);
/// What a keeping forward leaves, and then what remaking adds to it.
[[nodiscard]] Images run_keeping_and_remake(const GdnProblem& problem, const Run& run);

struct Summary {
    at::Tensor S, M;
};
[[nodiscard]] Summary run_summary(const GdnProblem& problem, const Run& run);

}  // namespace hybridcp::test
