#include <cuda_runtime_api.h>

#include <initializer_list>

#include "kernels/gdn/cuda/launch.h"

namespace hybridcp::gdn::cuda {

const char* read_device_traits(int device, DeviceTraits& traits) {
    const auto read = [device](int& value, cudaDeviceAttr attribute) {
        return cudaDeviceGetAttribute(&value, attribute, device);
    };
    for (const cudaError_t error : {read(traits.major, cudaDevAttrComputeCapabilityMajor),
                                    read(traits.minor, cudaDevAttrComputeCapabilityMinor),
                                    read(traits.multiprocessors, cudaDevAttrMultiProcessorCount)}) {
        if (error != cudaSuccess) {
            return cudaGetErrorString(error);
        }
    }
    return nullptr;
}

}  // namespace hybridcp::gdn::cuda
