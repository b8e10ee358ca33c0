// A tensor of local tokens that says which layout they are in. Every op that knows where its tokens
// stand takes these and refuses a layout that is not its plan's.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>

#include "hybridcp/layout.h"

namespace hybridcp {

struct BatchPlan;

struct Sharded {
    at::Tensor local;  // [T_local, ...]
    LayoutTag layout;

    /// Another tensor of the same tokens.
    [[nodiscard]] Sharded with(at::Tensor other) const { return {std::move(other), layout}; }
};

/// Errors: UsageError naming both layouts when a tensor is not in the plan's, or has not as many
/// rows as this rank has tokens.
void check_layout(const std::string& op,
                  std::initializer_list<const Sharded*> tensors,
                  const BatchPlan& plan);

}  // namespace hybridcp
