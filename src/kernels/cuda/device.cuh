#pragma once

// Primitives of our Hopper kernels. A kernel is a template function over a parameter struct that
// calls these and nothing else of CUDA: nvcc compiles it as the body of a __global__ function, and
// g++ for the emulator of tests/simt, which runs the same source thread for thread on a CPU
// (docs/simt-emulator.md). Both sides declare the same functions; the PTX side, in device/*.cuh,
// carries the descriptions.
//
// Shared memory has 32-bit addresses and is reached through load_shared and its kin alone, never
// through a C++ pointer: the emulator must see every access. Global memory goes through load_global
// and store_global.

#include "kernels/cuda/device/types.cuh"

#ifdef __CUDACC__
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/device/fragments.cuh"
#include "kernels/cuda/device/memory.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/device/synchronisation.cuh"
#include "kernels/cuda/device/threads.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#else
#include "simt/device.h"
#endif

#include "kernels/cuda/device/arrivals.cuh"
#include "kernels/cuda/device/descriptor.cuh"
