// The model that a recipe asks for, and what training needs to know of it.
#pragma once

#include <memory>
#include <string>

#include "hybridcp/model.h"
#include "train/recipe.h"
#include "train/trained_model.h"

namespace hybridcp {

/// The configuration of model.path or model.preset, cut to model.num_layers, with
/// model.router_aux_loss_coef. Errors: UsageError when that is given for a dense model,
/// or model.path is a checkpoint.
[[nodiscard]] ModelConfig recipe_model_config(const ModelRecipe& recipe);
/// `config` with the weight of the load-balancing loss replaced, where one is given. Errors:
/// UsageError when the model has no experts.
[[nodiscard]] ModelConfig with_router_aux_loss_coef(ModelConfig config,
                                                    const std::optional<double>& coefficient);
/// at::kFloat or at::kBFloat16.
[[nodiscard]] at::ScalarType compute_dtype_of(const std::string& dtype);
/// Of train.activation_checkpoint.
[[nodiscard]] ActivationCheckpoint activation_checkpoint_of(const std::string& word);

/// model.path, or the initialisation from train.seed (the same on every rank). `note` gets a line
/// for the user when tensors of the folder are skipped.
[[nodiscard]] std::unique_ptr<ParameterSource> parameter_source(const Recipe& recipe,
                                                                std::string* note = nullptr);
[[nodiscard]] TrainedModelOptions trained_model_options(const Recipe& recipe,
                                                        const Parallel& parallel);
/// The model whole, on the recipe's device, without what training keeps besides.
[[nodiscard]] HybridModel make_model(const Recipe& recipe);

}  // namespace hybridcp
