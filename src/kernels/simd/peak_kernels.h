// Loops that do nothing but multiply-adds on registers: what a core can do at most with an
// instruction set, for `hcp bench` to measure next to the kernels.
#pragma once

#include <cstdint>

#include "kernels/simd/dispatch.h"

namespace hybridcp {

/// Each runs its loop `rounds` times, returns the floating-point operations done (2 a
/// multiply-add), and adds a number that depends on all of them to *sink.
struct PeakKernels {
    std::int64_t (*fp32)(std::int64_t rounds, float* sink);
    /// bf16 operands, fp32 sums; null for an instruction set without such an instruction.
    std::int64_t (*bf16)(std::int64_t rounds, float* sink);
};

HCP_DECLARE_KERNELS(PeakKernels, peak_kernels)

}  // namespace hybridcp
