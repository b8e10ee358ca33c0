// causal_conv_silu with fused CPU kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace hybridcp {

[[nodiscard]] bool takes_fused_conv(const at::Tensor& x, const at::Tensor& weight);

/// As causal_conv_silu (causal_conv.h), for arguments that takes_fused_conv.
[[nodiscard]] at::Tensor fused_conv_silu(const at::Tensor& x,
                                         const at::Tensor& weight,
                                         const std::optional<at::Tensor>& halo,
                                         const std::vector<std::int64_t>& segment_offsets);

}  // namespace hybridcp
