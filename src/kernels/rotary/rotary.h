// Partial rotary position embedding: the first r dims of a head are rotated in pairs (i, i + r/2),
// the rest pass. The float32 product position * inv_freq is the definition of the angle, as in the
// public model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hybridcp {

struct RotaryTables {
    at::Tensor cos;  // [T, r], two equal halves, in the requested dtype
    at::Tensor sin;
};

/// positions [T] int64 -> tables of rotary_dim = r columns; inv_freq_i = 1 / theta^(2i/r) in fp32.
[[nodiscard]] RotaryTables make_rotary_tables(const at::Tensor& positions,
                                              std::int64_t rotary_dim,
                                              double theta,
                                              at::ScalarType dtype);

/// x [T, H, D], D >= r. Differentiable in x.
[[nodiscard]] at::Tensor apply_partial_rotary(const at::Tensor& x, const RotaryTables& tables);

}  // namespace hybridcp
