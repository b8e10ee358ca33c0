#pragma once

// Types and macros that both compilers share.

#include <cstdint>

#ifdef __CUDACC__
#define HCP_DEVICE __device__ __forceinline__
#else
#define HCP_DEVICE inline
#endif

namespace hybridcp::device {

struct alignas(8) Float2 {
    float x, y;
};
struct alignas(16) Float4 {
    float x, y, z, w;
};
struct alignas(8) Word2 {
    uint32_t x, y;
};
struct alignas(16) Word4 {
    uint32_t x, y, z, w;
};

/// Which index of a wgmma operand is contiguous in shared memory: K, or M of A and N of B.
enum class Major : int { kK = 0, kMn = 1 };

}  // namespace hybridcp::device
