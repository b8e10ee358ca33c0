#include "gdn_cuda/emulated_launch.h"
#include "kernels/gdn/cuda/launch.h"
#include "simt/launch.h"

namespace hybridcp::test {
namespace {

std::uint64_t seed_now = 1;
int launches = 0;

}  // namespace

void set_emulated_seed(std::uint64_t seed) {
    seed_now = seed;
}
int emulated_launches() {
    return launches;
}
const char* run_emulated(const EmulatedGrid& grid, const std::function<void()>& kernel) {
    ++launches;
    simt::launch({.blocks = static_cast<std::uint32_t>(grid.blocks),
                  .threads = grid.threads,
                  .cluster = grid.cluster,
                  .shared_bytes = grid.shared_bytes,
                  .seed = seed_now},
                 kernel);
    return nullptr;
}

}  // namespace hybridcp::test

namespace hybridcp::gdn::cuda {

const char* read_device_traits(int /*device*/, DeviceTraits& traits) {
    traits = {.major = 9, .minor = 0, .multiprocessors = 132};
    return nullptr;
}
void* current_stream(int /*device*/) {
    return nullptr;
}

}  // namespace hybridcp::gdn::cuda
