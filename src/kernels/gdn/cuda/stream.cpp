#include <c10/cuda/CUDAStream.h>

#include "kernels/gdn/cuda/launch.h"

namespace hybridcp::gdn::cuda {

void* current_stream(int device) {
    return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

}  // namespace hybridcp::gdn::cuda
