#pragma once

// The primitives of src/kernels/cuda/device.cuh for the emulator, described there. The last
// argument of most is the place of the call, for messages.

#include "simt/device_matrices.h"
#include "simt/device_memory.h"
#include "simt/device_synchronisation.h"
#include "simt/device_threads.h"
