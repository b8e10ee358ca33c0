// The sum of every parameter's gradient over the ranks of a job, in buckets, and the search for
// what is not finite.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hybridcp/group.h"
#include "train/parameter_piece.h"

namespace hybridcp {

/// Sums .grad over the world, in place; a parameter without a gradient counts (and becomes) zeros,
/// so that a rank whose shard is empty takes part. Every rank ends with the same bits. Comm: one
/// all-reduce (op "gradients") for each bucket of up to `bucket_bytes`, parameters in model order.
void all_reduce_gradients(const std::vector<NamedParameter>& parameters,
                          Group& world,
                          std::int64_t bucket_bytes = std::int64_t{64} << 20);

/// Name of the parameter whose gradient went wrong first in the backward pass, which runs from the
/// last layer to the first; empty when all are finite.
[[nodiscard]] std::string first_non_finite_gradient(const std::vector<ParameterPiece>& pieces);

}  // namespace hybridcp
