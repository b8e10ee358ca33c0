// The rows of the embedding as the stream between layers takes them.
#pragma once

#include <ATen/core/Tensor.h>

namespace hybridcp {

/// Rows of `weight`, rounded to `compute_dtype` as every weight is at use, in the stream's fp32
/// (fp64 for fp64). The gradient of the weight is summed and returned in the same, unrounded.
/// Shapes: weight [vocabulary, d] fp32 or the compute dtype; token_ids [T] int64; returns [T, d].
[[nodiscard]] at::Tensor embed_tokens(const at::Tensor& weight,
                                      const at::Tensor& token_ids,
                                      at::ScalarType compute_dtype);

}  // namespace hybridcp
