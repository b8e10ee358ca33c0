#pragma once

// Tensors as the Hopper kernels take them.

#include <ATen/core/Tensor.h>

#include "kernels/gdn/cuda/launch.h"

namespace hybridcp::gdn {

/// Heads of 128 features, as the kernels have them: zeros behind smaller ones change nothing.
[[nodiscard]] at::Tensor with_whole_rows(const at::Tensor& x);
[[nodiscard]] at::Tensor with_whole_states(const at::Tensor& x);
/// Rows that the copy engine can read where they are, else a copy.
[[nodiscard]] at::Tensor with_copyable_rows(const at::Tensor& x);
/// The same, and a token's heads one behind the other: what is copied two panels at once.
[[nodiscard]] at::Tensor with_adjoining_heads(const at::Tensor& x);
[[nodiscard]] cuda::RowsView rows_of(const at::Tensor& x);

}  // namespace hybridcp::gdn
