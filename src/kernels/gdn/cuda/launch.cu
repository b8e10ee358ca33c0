#include "kernels/gdn/cuda/launch.h"

#include <cuda_runtime.h>

#include <initializer_list>

#include "kernels/gdn/cuda/parameters.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*,
                                 CUtensorMapDataType,
                                 cuuint32_t,
                                 void*,
                                 const cuuint64_t*,
                                 const cuuint64_t*,
                                 const cuuint32_t*,
                                 const cuuint32_t*,
                                 CUtensorMapInterleave,
                                 CUtensorMapSwizzle,
                                 CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

/// Through the runtime, so that nothing links the driver's library.
EncodeTiled encode_tiled() {
    static const EncodeTiled function = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
        constexpr unsigned kVersion = 12000;
        const cudaError_t error = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &entry, kVersion, cudaEnableDefault, &found);
        const bool ok = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
        return reinterpret_cast<EncodeTiled>(ok ? entry : nullptr);
    }();
    return function;
}

const char* text(cudaError_t error) {
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class Params>
const char* allow_shared_memory(void (*kernel)(Params), const Grid& grid) {
    return text(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(grid.shared_bytes)));
}

/// Whether blocks may begin before the kernel before this one has ended, when that allows it.
enum class Order { kAfter, kOverlapping };

template <class Params>
const char* launch(void (*kernel)(Params),
                   const Params& params,
                   const Grid& grid,
                   void* stream,
                   Order order = Order::kAfter) {
    if (const char* error = allow_shared_memory(kernel, grid)) {
        return error;
    }
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = order == Order::kOverlapping ? 1 : 0;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {grid.cluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
    config.blockDim = dim3(grid.threads);
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = grid.cluster > 1 ? 2 : 1;
    return text(cudaLaunchKernelEx(&config, kernel, params));
}

/// The first error of several.
const char* first_of(std::initializer_list<const char*> errors) {
    for (const char* error : errors) {
        if (error != nullptr) {
            return error;
        }
    }
    return nullptr;
}

}  // namespace

const char* encode(device::TensorMap& map, const MapShape& shape) {
    if (encode_tiled() == nullptr) {
        return "the driver has no cuTensorMapEncodeTiled";
    }
    const cuuint32_t steps[3] = {1, 1, 1};
    const CUresult result = encode_tiled()(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, shape.data, shape.extent, shape.stride_bytes,
        shape.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused a tensor";
}

namespace {

template <class Config, class View>
const char* launch_walk(const CallView& call, const View& view) {
    if (call.num_pieces == 0) {
        return nullptr;  // nor does a tensor map take a tensor without tokens
    }
    ForwardParams p{};
    if (const char* error = fill(p, call, view)) {
        return error;
    }
    return launch(forward<Config>, p, forward_grid<Config>(p), call.stream);
}

const char* launch_forward(const CallView& call, const ForwardView& view) {
    return view.images.states != nullptr ? launch_walk<KeepConfig>(call, view)
                                         : launch_walk<OutputConfig>(call, view);
}
const char* launch_remake(const CallView& call, const RemakeView& view) {
    return launch_walk<RemakeConfig>(call, view);
}
const char* launch_summary(const CallView& call, const SummaryView& view) {
    return launch_walk<SummaryConfig>(call, view);
}

const char* launch_magnitudes(const CallView& call, const MagnitudesView& view) {
    if (call.num_pieces == 0) {
        return nullptr;
    }
    const MagnitudesParams p = magnitudes_params(call, view);
    return launch(magnitudes, p, magnitudes_grid(p), call.stream);
}

const char* launch_join(const CallView& call, const JoinView& view) {
    if (view.num_joins == 0) {
        return nullptr;
    }
    const JoinParams p = {view, call.shape};
    return launch(join_summaries, p, join_grid(p), call.stream);
}

const char* launch_state_gradient(const CallView& call, const StateGradientView& view) {
    if (call.num_pieces == 0) {
        return nullptr;
    }
    StateGradientParams p{};
    if (const char* error = fill(p, call, view)) {
        return error;
    }
    return launch(state_gradient, p, state_gradient_grid(call), call.stream, Order::kOverlapping);
}

const char* launch_gradients(const CallView& call, const GradientsView& view) {
    if (call.num_pieces == 0) {
        return nullptr;
    }
    GradientsParams p{};
    if (const char* error = fill(p, call, view)) {
        return error;
    }
    int device = 0, multiprocessors = 0;
    if (const char* error =
            first_of({text(cudaGetDevice(&device)),
                      text(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount,
                                                  device))})) {
        return error;
    }
    return launch(gradients_entry<GradientsConfig>, p, gradients_grid(call, multiprocessors),
                  call.stream, Order::kOverlapping);
}

}  // namespace

const Launches& launches() {
    static constexpr Launches kLaunches = {
        launch_forward,   launch_remake,     launch_summary, launch_state_gradient,
        launch_gradients, launch_magnitudes, launch_join};
    return kLaunches;
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
