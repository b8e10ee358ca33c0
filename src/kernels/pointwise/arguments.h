// What the arguments of all fused pointwise kernels share. Plain types only: these headers are read
// by files that are compiled once per instruction set (kernels/simd/vector.h).
#pragma once

#include <cstdint>

namespace hybridcp {

/// Of the tensors; the arithmetic is fp32 for both.
enum class Element : std::int8_t { kFloat, kBf16 };

/// A matrix that is read: elements of a row lie side by side, rows `stride` elements apart.
struct ConstRows {
    const void* data = nullptr;
    std::int64_t stride = 0;
};

/// The same for one that is written.
struct Rows {
    void* data = nullptr;
    std::int64_t stride = 0;
};

/// [begin, end)
struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
};

}  // namespace hybridcp
