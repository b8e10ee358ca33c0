// A training recipe: the YAML of docs/recipes.md as structs with their defaults. The keys, their
// allowed values and their order are written once, in recipe_fields.h; reading, printing and
// hashing all follow it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hybridcp/parallel.h"

namespace hybridcp {

struct ModelRecipe {
    std::optional<std::string> path = std::nullopt;         // a Hugging Face folder
    std::optional<std::string> preset = "tiny";             // unless path is given
    std::optional<std::int64_t> num_layers = std::nullopt;  // the first N
    std::string dtype = "bf16";                             // compute: bf16 | fp32
    // Weight of the load-balancing loss of a model with experts; none: the model's own.
    std::optional<double> router_aux_loss_coef = std::nullopt;
};

struct DataRecipe {
    std::vector<std::string> path = {};  // files and globs: text, .jsonl, token files
    std::string tokenizer = "bytes";
    std::int64_t sequence_length = 4096;  // tokens a row
    std::vector<std::string> validation_path = {};
    bool packing = true;
};

struct OptimizerRecipe {
    std::string name = "adamw";
    double lr = 1e-3;
    std::array<double, 2> betas{0.9, 0.95};
    double eps = 1e-8;
    double weight_decay = 0.1;
};

struct ScheduleRecipe {
    std::int64_t warmup_steps = 10;
    std::string decay = "cosine";  // cosine | linear | constant
    double min_lr_ratio = 0.1;
};

struct TrainRecipe {
    std::int64_t steps = 100;
    std::int64_t global_batch_size = 4;  // rows
    std::int64_t micro_batch_size = 1;   // rows
    std::int64_t seed = 0;
    OptimizerRecipe optimizer = {};
    ScheduleRecipe schedule = {};
    double grad_clip = 1.0;       // 0: no clipping
    std::int64_t eval_every = 0;  // steps; 0: never
    std::string activation_checkpoint = "none";
    std::int64_t gdn_chunk_size = 64;  // tokens
    std::int64_t comm_timeout_seconds = 600;
    ParallelOptions accelerator = {};
};

struct CheckpointRecipe {
    std::optional<std::string> dir = std::nullopt;  // none: no checkpoints
    std::int64_t every = 50;                        // steps; 0: only at the end
    std::int64_t keep = 2;
    std::string resume = "auto";  // auto | never | a checkpoint's folder
};

struct LogRecipe {
    std::optional<std::string> dir = std::nullopt;  // none: no metrics file and no picture
    std::int64_t every = 1;                         // steps between progress lines
};

struct Recipe {
    ModelRecipe model = {};
    DataRecipe data = {};
    TrainRecipe train = {};
    CheckpointRecipe checkpoint = {};
    LogRecipe log = {};
};

/// Reads a recipe file, then the overrides `key.path=value` (values are YAML) in their order.
/// Errors: FormatError for YAML that does not parse; UsageError, one line with the file's line or
/// the override, for an unknown key (naming the nearest), a wrong type, a value out of range, or
/// one that would be ignored.
[[nodiscard]] Recipe load_recipe(const std::string& path,
                                 const std::vector<std::string>& overrides = {});
/// The same from text (which may be empty: all defaults); `name` stands for the file in messages.
[[nodiscard]] Recipe parse_recipe(const std::string& text,
                                  const std::string& name,
                                  const std::vector<std::string>& overrides = {});

/// Every key with its value, as YAML that load_recipe reads back to the same recipe.
[[nodiscard]] std::string to_yaml(const Recipe& recipe);
/// Equal on ranks whose recipes are equal.
[[nodiscard]] std::uint64_t recipe_hash(const Recipe& recipe);

}  // namespace hybridcp
