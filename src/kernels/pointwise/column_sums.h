// Sums over rows, for weight gradients: each task of a kernel leaves one row of partial sums.
#pragma once

#include "kernels/pointwise/arguments.h"

namespace hybridcp {

struct ColumnSums {
    /// sums[c] = partials[0][c] + partials[1][c] + ..., in this order. partials [count, width].
    void (*add)(const float* partials, std::int64_t count, std::int64_t width, float* sums);
};

}  // namespace hybridcp
