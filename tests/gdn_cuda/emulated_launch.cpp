#include "gdn_cuda/emulated_launch.h"

#include "kernels/gdn/cuda/parameters.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

const char* encode(device::TensorMap& map, const MapShape& shape) {
    const auto refused = [](uint64_t stride) { return stride == 0 || stride % 16 != 0; };
    if (shape.extent[1] == 0 || shape.extent[2] == 0 ||
        reinterpret_cast<uintptr_t>(shape.data) % 16 != 0 || refused(shape.stride_bytes[0]) ||
        refused(shape.stride_bytes[1]) || shape.stride_bytes[0] >= uint64_t{1} << 40 ||
        shape.stride_bytes[1] >= uint64_t{1} << 40) {
        return "refused, as cuTensorMapEncodeTiled would";
    }
    map = {
        .data = static_cast<std::byte*>(shape.data),
        .extent = {static_cast<uint32_t>(shape.extent[0]), static_cast<uint32_t>(shape.extent[1]),
                   static_cast<uint32_t>(shape.extent[2])},
        .stride_bytes = {shape.stride_bytes[0], shape.stride_bytes[1]},
        .box = {shape.box[0], shape.box[1], shape.box[2]}};
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
                            : run(forward_grid<Config>(p), [&] { forward_kernel<Config>(p); });
}
const char* launch_forward(const CallView& call, const ForwardView& view) {
    return view.images.states != nullptr ? walk<KeepConfig>(call, view)
                                         : walk<OutputConfig>(call, view);
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
const char* launch_join(const CallView& call, const JoinView& view) {
    if (view.num_joins == 0) {
        return nullptr;
    }
    const JoinParams p = {view, call.shape};
    return run(join_grid(p), [&] { join_kernel(p); });
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
    static constexpr Launches kLaunches = {
        launch_forward,   launch_remake,     launch_summary, launch_state_gradient,
        launch_gradients, launch_magnitudes, launch_join};
    return kLaunches;
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
