// A recipe's sizes as the memory plan takes them.
#pragma once

#include "hybridcp/model_config.h"
#include "plan/memory_plan.h"
#include "train/recipe.h"

namespace hybridcp {

[[nodiscard]] plan::ModelSizes model_sizes(const ModelConfig& config);
/// Of the recipe's mesh, whatever ranks there are. Each row counts as one document. Errors:
/// UsageError for a choice that is not supported.
[[nodiscard]] plan::MemoryPlanInput memory_plan_input(const Recipe& recipe);

}  // namespace hybridcp
