#pragma once

// Primitives and tables of the Hopper kernels of Gated DeltaNet (docs/gdn-cuda.md).

#include "kernels/cuda/device.cuh"
#include "kernels/gdn/cuda/runs.h"
