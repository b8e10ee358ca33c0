// The kernels' names without their type of operands: a test is compiled for one.
#pragma once

#include "kernels/gdn/cuda/operands.cuh"

namespace hybridcp::gdn::cuda {
using namespace HCP_OPERANDS;  // NOLINT(google-build-using-namespace)
}
