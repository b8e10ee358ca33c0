// The rows of the embedding as the stream between layers takes them.
#pragma once

#include <ATen/core/Tensor.h>

namespace hybridcp {

/// Rows of `weight` in the stream's fp32 (fp64 for fp64). They are not rounded to the compute
/// dtype: with rounded rows, runs on other ranks part twice as fast in bf16. The gradient of the
/// weight is summed and returned in the same, unrounded. Shapes: weight [vocabulary, d] fp32;
/// token_ids [T] int64; returns [T, d].
[[nodiscard]] at::Tensor embed_tokens(const at::Tensor& weight,
                                      const at::Tensor& token_ids,
                                      at::ScalarType compute_dtype);

}  // namespace hybridcp
