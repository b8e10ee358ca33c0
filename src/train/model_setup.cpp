#include "train/model_setup.h"

#include <filesystem>

#include "hybridcp/error.h"
#include "train/checkpoint_manifest.h"

namespace hybridcp {

ModelConfig recipe_model_config(const ModelRecipe& recipe) {
    if (recipe.path && std::filesystem::exists(*recipe.path + "/" + kStateFile)) {
        throw UsageError(
            fmt::format("model.path: {0} is a checkpoint: write its model with 'hcp export {0} "
                        "FOLDER' and use that, or go on with its run by checkpoint.resume",
                        *recipe.path));
    }
    ModelConfig config =
        recipe.path ? read_model_config(*recipe.path) : preset_model_config(recipe.preset.value());
    if (recipe.num_layers) {
        config = with_num_layers(std::move(config), *recipe.num_layers);
    }
    return with_router_aux_loss_coef(std::move(config), recipe.router_aux_loss_coef);
}

ModelConfig with_router_aux_loss_coef(ModelConfig config,
                                      const std::optional<double>& coefficient) {
    if (!coefficient) {
        return config;
    }
    if (!config.has_experts()) {
        throw UsageError(
            "model.router_aux_loss_coef would be ignored, because the model has no experts: "
            "leave it out or set it to null");
    }
    config.router_aux_loss_coef = *coefficient;
    return config;
}

at::ScalarType compute_dtype_of(const std::string& dtype) {
    HCP_CHECK(dtype == "fp32" || dtype == "bf16", "model.dtype {} (one of bf16, fp32)", dtype);
    return dtype == "fp32" ? at::kFloat : at::kBFloat16;
}

ActivationCheckpoint activation_checkpoint_of(const std::string& word) {
    HCP_CHECK(word == "none" || word == "full" || word == "selective",
              "train.activation_checkpoint {} (one of none, full, selective)", word);
    return word == "full"        ? ActivationCheckpoint::kFull
           : word == "selective" ? ActivationCheckpoint::kSelective
                                 : ActivationCheckpoint::kNone;
}

TrainedModelOptions trained_model_options(const Recipe& recipe, const Parallel& parallel) {
    const OptimizerRecipe& optimizer = recipe.train.optimizer;
    return {.config = recipe_model_config(recipe.model),
            .compute_dtype = compute_dtype_of(recipe.model.dtype),
            .gdn_chunk_size = recipe.train.gdn_chunk_size,
            .activation_checkpoint = activation_checkpoint_of(recipe.train.activation_checkpoint),
            .optimizer = {.betas = optimizer.betas,
                          .eps = optimizer.eps,
                          .weight_decay = optimizer.weight_decay},
            .sharded = parallel.fsdp,
            .prefetch = parallel.fsdp_prefetch};
}

std::unique_ptr<ParameterSource> parameter_source(const Recipe& recipe, std::string* note) {
    const ModelConfig config = recipe_model_config(recipe.model);
    return recipe.model.path
               ? stored_parameters(*recipe.model.path, config, note)
               : random_parameters(config, static_cast<std::uint64_t>(recipe.train.seed));
}

HybridModel make_model(const Recipe& recipe) {
    const ModelConfig config = recipe_model_config(recipe.model);
    const at::Device device(recipe.train.accelerator.device);
    HybridModel model(config, read_parameters(*parameter_source(recipe), config, device),
                      compute_dtype_of(recipe.model.dtype));
    model.gdn_chunk_size = recipe.train.gdn_chunk_size;
    model.activation_checkpoint = activation_checkpoint_of(recipe.train.activation_checkpoint);
    return model;
}

}  // namespace hybridcp
