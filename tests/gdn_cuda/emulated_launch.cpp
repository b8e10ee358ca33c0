#include "gdn_cuda/emulated_launch.h"

#include "kernels/gdn/cuda/parameters.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

const char* make_map(device::TensorMap& map, const RowsView& rows, int32_t tokens, int32_t heads) {
    const auto bytes = [](int64_t elements) { return static_cast<uint64_t>(elements) * 2; };
    if (tokens == 0 || heads == 0 || reinterpret_cast<uintptr_t>(rows.data) % 16 != 0 ||
        bytes(rows.head_stride) % 16 != 0 || bytes(rows.token_stride) % 16 != 0 ||
        rows.head_stride <= 0 || rows.token_stride <= 0) {
        return "refused, as cuTensorMapEncodeTiled would";
    }
    map = {.data = static_cast<std::byte*>(rows.data),
           .extent = {kHeadDim, static_cast<uint32_t>(heads), static_cast<uint32_t>(tokens)},
           .stride_bytes = {bytes(rows.head_stride), bytes(rows.token_stride)},
           .box = {64, 1, kChunkTokens}};
    return nullptr;
}

namespace {

template <class Kernel>
const char* run(const Grid& grid, Kernel kernel) {
    return test::run_emulated({.blocks = grid.blocks,
                               .threads = grid.threads,
                               .shared_bytes = grid.shared_bytes,
                               .cluster = grid.cluster},
                              kernel);
}

template <class Config, class View>
const char* walk(const CallView& call, const View& view) {
    if (call.num_pieces == 0) {
        return nullptr;
    }
    ForwardParams p{};
    const char* error = fill(p, call, view);
    return error != nullptr ? error
                            : run(forward_grid<Config>(call), [&] { forward_kernel<Config>(p); });
}
const char* launch_forward(const CallView& call, const ForwardView& view) {
    return view.states != nullptr ? walk<KeepConfig>(call, view) : walk<OutputConfig>(call, view);
}
const char* launch_remake(const CallView& call, const RemakeView& view) {
    return walk<RemakeConfig>(call, view);
}
const char* launch_summary(const CallView& call, const SummaryView& view) {
    return walk<SummaryConfig>(call, view);
}
const char* launch_magnitudes(const CallView& call, const MagnitudesView& view) {
    if (call.num_pieces == 0) {
        return nullptr;
    }
    const MagnitudesParams p = magnitudes_params(call, view);
    return run(magnitudes_grid(p), [&] { magnitudes_kernel(p); });
}
const char* launch_state_gradient(const CallView& call, const StateGradientView& view) {
    if (call.num_pieces == 0) {
        return nullptr;
    }
    StateGradientParams p{};
    const char* error = fill(p, call, view);
    return error != nullptr ? error
                            : run(state_gradient_grid(call), [&] { state_gradient_kernel(p); });
}
const char* launch_gradients(const CallView& call, const GradientsView& view) {
    if (call.num_pieces == 0) {
        return nullptr;
    }
    GradientsParams p{};
    const char* error = fill(p, call, view);
    return error != nullptr
               ? error
               : run(gradients_grid(call, 2), [&] { gradients_kernel<GradientsConfig>(p); });
}

}  // namespace

const Launches& launches() {
    static constexpr Launches kLaunches = {launch_forward,   launch_remake,
                                           launch_summary,   launch_state_gradient,
                                           launch_gradients, launch_magnitudes};
    return kLaunches;
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
