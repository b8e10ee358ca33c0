// The launches of src/kernels/gdn/cuda/launch.h in the emulator: with them the backend's own host
// code runs on tensors of the CPU.
#pragma once

#include <cstdint>
#include <functional>

namespace hybridcp::test {

/// Of the emulator's schedule, for launches from now on.
void set_emulated_seed(std::uint64_t seed);
/// Launches so far.
[[nodiscard]] int emulated_launches();

struct EmulatedGrid {
    std::int64_t blocks;
    std::uint32_t threads, shared_bytes, cluster;
};
/// Returns null, as a launch does.
const char* run_emulated(const EmulatedGrid& grid, const std::function<void()>& kernel);

}  // namespace hybridcp::test
