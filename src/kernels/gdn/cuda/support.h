#pragma once

#include "kernels/gdn/backends.h"

namespace hybridcp::gdn::cuda {

/// Errors: UsageError naming what the fused backend on CUDA does not take of the problem.
void check_support(const Problem& problem);

}  // namespace hybridcp::gdn::cuda
