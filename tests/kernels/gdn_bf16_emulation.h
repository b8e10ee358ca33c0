// What honest bf16 arithmetic gives for the chunkwise formulas: every operand of a matrix product
// is rounded to bf16, sums and the state are fp32. A yardstick for backends that compute in bf16,
// not a backend.
#pragma once

#include "kernels/gdn_support.h"

namespace hybridcp::test {

/// Outputs and gradients as run_all names them, outputs and dq, dk, dv, dbeta rounded to bf16.
[[nodiscard]] Tensors bf16_emulation(const GdnCase& gdn_case);

}  // namespace hybridcp::test
