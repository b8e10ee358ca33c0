// One decoder layer: the call, and what it gives. For sources of this folder.
#pragma once

#include "hybridcp/model.h"
#include "kernels/rotary/rotary.h"
#include "ops/context_parallel.h"

namespace hybridcp {

struct HybridModel::Block {
    std::int64_t layer = 0;
    RotaryTables rotary;
    CpContext context;
    bool keep_router_logits = false;
};

struct HybridModel::BlockOutput {
    at::Tensor hidden;                 // [T, d], the stream
    at::Tensor expert_counts = {};     // [E]; this and what follows: of a model with experts
    at::Tensor probability_sums = {};  // [E]
    at::Tensor router_logits = {};     // [T, E], detached, when asked for
};

/// The layout in which a layer's mixer runs.
[[nodiscard]] LayoutTag mixer_layout(const ModelConfig& config,
                                     std::int64_t layer,
                                     const CpContext& context);

}  // namespace hybridcp
