// What honest bf16 arithmetic gives for the chunkwise formulas: every operand of a matrix product
// is rounded to bf16, sums and the state are fp32. A yardstick for backends that compute in bf16,
// not a backend.
#pragma once

#include "kernels/gdn_support.h"

namespace hybridcp::test {

struct EmulationOptions {
    std::int64_t chunk_size = 64;
    /// The triangular system is solved in fp32 for its right-hand side, instead of multiplying by
    /// its inverse rounded to bf16; factors of rows go to d_o instead of q.
    bool like_kernels = false;
    /// States, their gradients, E and dD pass from one kernel to the next in bf16
    /// (docs/gdn-cuda.md).
    bool images = false;
};

/// Outputs and gradients as run_all names them, outputs and dq, dk, dv, dbeta rounded to bf16.
[[nodiscard]] Tensors bf16_emulation(const GdnCase& gdn_case, const EmulationOptions& options = {});

/// 64 rows with the rounded inverse, and 32 rows like the kernels of the CPU.
[[nodiscard]] std::vector<EmulationOptions> cpu_emulations();
/// These, and 64 rows with images between kernels.
[[nodiscard]] std::vector<EmulationOptions> cuda_emulations();

/// The yardstick of the 1.5 times rule: per tensor of `expected`, the largest error of several
/// honest emulations.
[[nodiscard]] std::map<std::string, double> bf16_yardstick(
    const GdnCase& gdn_case,
    const Tensors& expected,
    double (*error)(const at::Tensor& x, const at::Tensor& reference) = worst_head_error,
    const std::vector<EmulationOptions>& emulations = cpu_emulations());

}  // namespace hybridcp::test
