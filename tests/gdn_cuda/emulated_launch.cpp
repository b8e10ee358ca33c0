#include "gdn_cuda/emulated_launch.h"

#include "kernels/gdn/cuda/parameters.cuh"
#include "simt/launch.h"

namespace hybridcp::test {
namespace {

std::uint64_t seed_now = 1;
int launches = 0;

template <class Kernel>
const char* run(const gdn::cuda::Grid& grid, Kernel kernel) {
    ++launches;
    simt::launch({.blocks = static_cast<std::uint32_t>(grid.blocks),
                  .threads = grid.threads,
                  .cluster = grid.cluster,
                  .shared_bytes = grid.shared_bytes,
                  .seed = seed_now},
                 kernel);
    return nullptr;
}

}  // namespace

void set_emulated_seed(std::uint64_t seed) {
    seed_now = seed;
}
int emulated_launches() {
    return launches;
}

}  // namespace hybridcp::test

namespace hybridcp::gdn::cuda {

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

const char* read_device_traits(int /*device*/, DeviceTraits& traits) {
    traits = {.major = 9, .minor = 0, .multiprocessors = 132};
    return nullptr;
}
void* current_stream(int /*device*/) {
    return nullptr;
}

template <class Config, class View>
const char* walk(const CallView& call, const View& view) {
    if (call.num_pieces == 0) {
        return nullptr;
    }
    ForwardParams p{};
    const char* error = fill(p, call, view);
    return error != nullptr
               ? error
               : test::run(forward_grid<Config>(call), [&] { forward_kernel<Config>(p); });
}
const char* launch_forward(const CallView& call, const ForwardView& view) {
    return walk<OutputConfig>(call, view);
}
const char* launch_remake(const CallView& call, const RemakeView& view) {
    return walk<RemakeConfig>(call, view);
}
const char* launch_summary(const CallView& call, const SummaryView& view) {
    return walk<SummaryConfig>(call, view);
}
const char* launch_state_gradient(const CallView& call, const StateGradientView& view) {
    if (call.num_pieces == 0) {
        return nullptr;
    }
    StateGradientParams p{};
    const char* error = fill(p, call, view);
    return error != nullptr
               ? error
               : test::run(state_gradient_grid(call), [&] { state_gradient_kernel(p); });
}
const char* launch_gradients(const CallView& call, const GradientsView& view) {
    if (call.num_pieces == 0) {
        return nullptr;
    }
    GradientsParams p{};
    const char* error = fill(p, call, view);
    return error != nullptr
               ? error
               : test::run(gradients_grid(call, 2), [&] { gradients_kernel<GradientsConfig>(p); });
}

}  // namespace hybridcp::gdn::cuda
