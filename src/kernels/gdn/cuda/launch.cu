#include "kernels/gdn/cuda/launch.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>

#include "kernels/gdn/cuda/forward.cuh"
#include "kernels/gdn/cuda/gradients.cuh"
#include "kernels/gdn/cuda/state_gradient.cuh"

namespace hybridcp::gdn::cuda {
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

const char* make_map(CUtensorMap& map, const RowsView& rows, int32_t tokens, int32_t heads) {
    if (encode_tiled() == nullptr) {
        return "the driver has no cuTensorMapEncodeTiled";
    }
    constexpr cuuint64_t kElementBytes = 2;
    const cuuint64_t extent[3] = {kHeadDim, static_cast<cuuint64_t>(heads),
                                  static_cast<cuuint64_t>(tokens)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(rows.head_stride) * kElementBytes,
                                   static_cast<cuuint64_t>(rows.token_stride) * kElementBytes};
    const cuuint32_t box[3] = {64, 1, kChunkTokens};
    const cuuint32_t steps[3] = {1, 1, 1};
    const CUresult result =
        encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, rows.data, extent, strides, box,
                       steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused a tensor";
}

const char* text(cudaError_t error) {
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

struct Grid {
    int64_t blocks;
    uint32_t threads, shared_bytes, cluster;
};

/// A launch of `grid`, with its cluster in `attribute`.
cudaLaunchConfig_t config_of(const Grid& grid, cudaLaunchAttribute& attribute, void* stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {grid.cluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
    config.blockDim = dim3(grid.threads);
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = 1;
    return config;
}

template <class Params>
const char* allow_shared_memory(void (*kernel)(Params), const Grid& grid) {
    return text(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(grid.shared_bytes)));
}

template <class Params>
const char* launch(void (*kernel)(Params), const Params& params, const Grid& grid, void* stream) {
    if (grid.blocks == 0) {
        return nullptr;
    }
    if (const char* error = allow_shared_memory(kernel, grid)) {
        return error;
    }
    cudaLaunchAttribute attribute{};
    const cudaLaunchConfig_t config = config_of(grid, attribute, stream);
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

const char* read_device_traits(int device, DeviceTraits& traits) {
    return first_of(
        {text(cudaDeviceGetAttribute(&traits.major, cudaDevAttrComputeCapabilityMajor, device)),
         text(cudaDeviceGetAttribute(&traits.minor, cudaDevAttrComputeCapabilityMinor, device)),
         text(cudaDeviceGetAttribute(&traits.multiprocessors, cudaDevAttrMultiProcessorCount,
                                     device))});
}

namespace {

/// What all configurations of the forward kernel need.
const char* fill(ForwardParams& p, const CallView& call) {
    p.gates = call.gates;
    p.shape = call.shape;
    p.chunks = call.chunks;
    p.pieces = call.pieces;
    p.num_pieces = call.num_pieces;
    p.may_truncate = call.may_truncate;
    return first_of({make_map(p.k, call.k, call.shape.tokens, call.shape.key_heads),
                     make_map(p.v, call.v, call.shape.tokens, call.shape.value_heads)});
}
template <class Config>
const char* launch(const ForwardParams& p, const CallView& call, int64_t clusters) {
    return launch(
        forward<Config>, p,
        {clusters * Config::kCluster, Config::kThreads, Config::kSharedBytes, Config::kCluster},
        call.stream);
}

}  // namespace

const char* launch_forward(const CallView& call, const ForwardView& view) {
    ForwardParams p{};
    const Shape& shape = call.shape;
    if (const char* error =
            first_of({fill(p, call), make_map(p.q, call.q, shape.tokens, shape.key_heads),
                      make_map(p.o, view.o, shape.tokens, shape.value_heads)})) {
        return error;
    }
    p.start_states = view.start;
    p.end_states = view.end;
    p.o_rows = static_cast<uint16_t*>(view.o.data);
    p.o_token_stride = view.o.token_stride;
    p.o_head_stride = view.o.head_stride;
    p.q_norms = view.q_norms;
    p.k_norms = view.k_norms;
    return launch<OutputConfig>(p, call, int64_t{call.num_pieces} * shape.value_heads);
}

const char* launch_remake(const CallView& call, const RemakeView& view) {
    ForwardParams p{};
    if (const char* error = fill(p, call)) {
        return error;
    }
    p.start_states = view.start;
    p.states = reinterpret_cast<uint16_t*>(view.states);
    p.errors = reinterpret_cast<uint16_t*>(view.errors);
    p.inverses = reinterpret_cast<uint16_t*>(view.inverses);
    return launch<RemakeConfig>(p, call, int64_t{call.num_pieces} * call.shape.value_heads);
}

const char* launch_summary(const CallView& call, const SummaryView& view) {
    ForwardParams p{};
    if (const char* error = fill(p, call)) {
        return error;
    }
    p.end_states = view.S;
    p.transitions = view.M;
    p.summary_floor = view.floor;
    return launch<SummaryConfig>(p, call, int64_t{2} * call.num_pieces * call.shape.value_heads);
}

const char* launch_state_gradient(const CallView& call, const StateGradientView& view) {
    StateGradientParams p{};
    const Shape& shape = call.shape;
    if (const char* error =
            first_of({make_map(p.q, call.q, shape.tokens, shape.key_heads),
                      make_map(p.k, call.k, shape.tokens, shape.key_heads),
                      make_map(p.d_o, view.d_o, shape.tokens, shape.value_heads)})) {
        return error;
    }
    p.gates = call.gates;
    p.shape = shape;
    p.chunks = call.chunks;
    p.pieces = call.pieces;
    p.q_norms = view.q_norms;
    p.k_norms = view.k_norms;
    p.inverses = view.inverses;
    p.d_end = view.d_end;
    p.d_start = view.d_start;
    p.d_states = view.d_states;
    p.d_new_values = view.d_new_values;
    p.may_truncate = call.may_truncate;
    p.summary_floor = view.summary_floor;
    return launch(state_gradient, p,
                  {int64_t{call.num_pieces} * shape.value_heads * 2, StateGradientLayout::kThreads,
                   StateGradientLayout::kSharedBytes, 1},
                  call.stream);
}

const char* launch_gradients(const CallView& call, const GradientsView& view) {
    GradientsParams p{};
    const Shape& shape = call.shape;
    if (const char* error =
            first_of({make_map(p.q, call.q, shape.tokens, shape.key_heads),
                      make_map(p.k, call.k, shape.tokens, shape.key_heads),
                      make_map(p.d_o, view.d_o, shape.tokens, shape.value_heads)})) {
        return error;
    }
    p.shape = shape;
    p.has_d_o = true;
    p.gates = call.gates;
    p.r_q = view.q_norms;
    p.r_k = view.k_norms;
    p.chunks = call.chunks;
    p.e = view.errors;
    p.z = view.d_new_values;
    p.inverse = view.inverses;
    p.state = view.states;
    p.state_gradient = view.d_states;
    p.dq = static_cast<uint16_t*>(view.dq);
    p.dk = static_cast<uint16_t*>(view.dk);
    p.dv = static_cast<uint16_t*>(view.dv);
    p.dg = view.dg;
    p.dbeta = view.dbeta;
    p.dg_token_stride = p.dbeta_token_stride = shape.value_heads;
    p.dg_head_stride = p.dbeta_head_stride = 1;
    const auto group = static_cast<uint32_t>(shape.value_heads / shape.key_heads);
    // As many clusters as run at once: how many fit depends on how the multiprocessors are grouped.
    Grid grid = {group, GradientsConfig::kThreads, GradientsConfig::kSharedBytes, group};
    cudaLaunchAttribute attribute{};
    int clusters = 0;
    const cudaLaunchConfig_t config = config_of(grid, attribute, call.stream);
    if (const char* error =
            first_of({allow_shared_memory(gradients_entry<GradientsConfig>, grid),
                      text(cudaOccupancyMaxActiveClusters(
                          &clusters, gradients_entry<GradientsConfig>, &config))})) {
        return error;
    }
    const int64_t items = int64_t{shape.num_chunks} * shape.key_heads;
    grid.blocks = std::min<int64_t>(items, clusters) * group;
    return launch(gradients_entry<GradientsConfig>, p, grid, call.stream);
}

}  // namespace hybridcp::gdn::cuda
