// Depthwise causal convolution over time, then SiLU, over packed local segments.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace hybridcp {

/// y_t = silu(sum_j weight[:, j] x_{t - W + 1 + j}); rows before a segment come from its halo, or
/// are zero. Differentiable in x, weight and halo. Shapes: x [T, C]; weight [C, W]; halo [N, W-1,
/// C] (row W-2 is the one just before the segment) or undefined;
///         returns [T, C] in x's dtype; rows from segment_offsets.back() on are zero.
/// Errors: UsageError for shapes that do not fit.
[[nodiscard]] at::Tensor causal_conv_silu(const at::Tensor& x,
                                          const at::Tensor& weight,
                                          const at::Tensor& halo,
                                          const std::vector<std::int64_t>& segment_offsets);

}  // namespace hybridcp
