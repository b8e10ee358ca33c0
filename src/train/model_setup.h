// The model that a recipe asks for.
#pragma once

#include <string>

#include "hybridcp/model.h"
#include "train/recipe.h"

namespace hybridcp {

/// The configuration of model.path or model.preset, cut to model.num_layers.
[[nodiscard]] ModelConfig recipe_model_config(const ModelRecipe& recipe);
/// at::kFloat or at::kBFloat16.
[[nodiscard]] at::ScalarType compute_dtype_of(const std::string& dtype);

/// Loads model.path, or initialises from train.seed (the same on every rank). `note` gets a line
/// for the user when tensors of the folder were skipped.
[[nodiscard]] HybridModel make_model(const Recipe& recipe, std::string* note = nullptr);

}  // namespace hybridcp
