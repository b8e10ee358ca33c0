// The model that a recipe asks for.
#pragma once

#include <string>

#include "hybridcp/model.h"
#include "train/recipe.h"

namespace hybridcp {

/// The configuration of model.path or model.preset, cut to model.num_layers, with
/// model.router_aux_loss_coef. Errors: UsageError when that is given for a dense model.
[[nodiscard]] ModelConfig recipe_model_config(const ModelRecipe& recipe);
/// `config` with the weight of the load-balancing loss replaced, where one is given. Errors:
/// UsageError when the model has no experts.
[[nodiscard]] ModelConfig with_router_aux_loss_coef(ModelConfig config,
                                                    const std::optional<double>& coefficient);
/// at::kFloat or at::kBFloat16.
[[nodiscard]] at::ScalarType compute_dtype_of(const std::string& dtype);
/// Of train.activation_checkpoint.
[[nodiscard]] ActivationCheckpoint activation_checkpoint_of(const std::string& word);

/// Loads model.path, or initialises from train.seed (the same on every rank). `note` gets a line
/// for the user when tensors of the folder were skipped.
[[nodiscard]] HybridModel make_model(const Recipe& recipe, std::string* note = nullptr);

}  // namespace hybridcp
