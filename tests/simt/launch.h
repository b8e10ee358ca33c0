#pragma once

// Runs a kernel under the emulator (docs/simt-emulator.md):
//     launch({.blocks = 4, .threads = 384, .cluster = 2, .shared_bytes = 65536, .seed = 1}, [&] {
//     kernel(params); });
// It throws Fault with one message when the kernel misuses the machine or can make no progress.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

namespace hybridcp::simt {

class Fault : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// Global memory that a kernel may touch.
struct Buffer {
    const void* data;
    std::size_t bytes;
    bool writable = true;
};

struct LaunchOptions {
    uint32_t blocks = 1;
    uint32_t blocks_y = 1;
    uint32_t threads = 32;  // a block, a multiple of 32
    uint32_t cluster = 1;   // blocks a cluster, along x
    uint32_t shared_bytes = 0;
    uint64_t seed = 0;                 // of the scheduler and of the moments of asynchronous work
    std::vector<Buffer> buffers = {};  // none: global accesses are not checked
    uint64_t most_steps = 50'000'000;  // turns of warps; more counts as no progress
};

void launch(const LaunchOptions& options, const std::function<void()>& kernel);

/// What cuTensorMapEncodeTiled makes: a 3-d tensor, the contiguous index first, and the box that
/// one copy moves.
struct TensorMap {
    std::byte* data = nullptr;
    uint32_t element_bytes = 2;
    std::array<uint32_t, 3> extent{};
    std::array<uint64_t, 2> stride_bytes{};  // of the second and third index
    std::array<uint32_t, 3> box{};
    bool swizzle_128 = true;
};

}  // namespace hybridcp::simt
