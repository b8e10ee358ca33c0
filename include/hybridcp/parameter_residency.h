// Who holds the weights while they are not computed with. A model runs unit after unit: the
// embedding, each block, the head with the final norm; sharded parameters gather a unit's weights
// before they are used and free them afterwards.
#pragma once

#include <cstdint>

namespace hybridcp {

/// Called by the model around each unit, on every rank in the same order. Units: 0 the embedding,
/// 1 + i block i, 1 + number of blocks the final norm and the head (and a tied embedding again).
class ParameterResidency {
  public:
    virtual ~ParameterResidency() = default;
    /// From here on the unit's weights can be read, until after_forward.
    virtual void before_forward(std::int64_t unit) = 0;
    virtual void after_forward(std::int64_t unit) = 0;
    /// The same for the backward pass.
    virtual void before_backward(std::int64_t unit) = 0;
    /// All gradients of the unit's parameters are in their leaves' .grad and may be taken from
    /// there; a tied head's only with the embedding's.
    virtual void after_backward(std::int64_t unit) = 0;
};

}  // namespace hybridcp
