#include "train/recipe.h"

#include <gtest/gtest.h>

#include "hybridcp/error.h"
#include "train/model_setup.h"

namespace hybridcp {
namespace {

std::string refusal(const std::string& text, const std::vector<std::string>& overrides = {}) {
    try {
        (void)parse_recipe(text, "r.yaml", overrides);
    } catch (const Error& error) {
        EXPECT_EQ(error.exit_status(), 2);
        EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
        return error.what();
    }
    return "accepted";
}

TEST(Recipe, AnEmptyRecipeIsTheDefaults) {
    const Recipe recipe = parse_recipe("", "r.yaml");
    EXPECT_EQ(recipe.model.preset, "tiny");
    EXPECT_EQ(recipe.model.dtype, "bf16");
    EXPECT_EQ(recipe.train.optimizer.betas[1], 0.95);
    EXPECT_EQ(recipe.train.accelerator.linear_attention_cp_mode, "ulysses");
    EXPECT_FALSE(recipe.checkpoint.dir.has_value());
}

TEST(Recipe, ValuesListsAndOverridesAreRead) {
    const Recipe recipe = parse_recipe(
        "model: {path: some/folder, num_layers: 4}\n"
        "data:\n  path: [a/*.txt, b.jsonl]\n  packing: false\n"
        "train:\n  optimizer: {lr: 3e-4, betas: [0.8, 0.9]}\n  accelerator: {cp: 4, "
        "ulysses_degree: 4}\n",
        "r.yaml", {"train.accelerator.cp=8", "data.path=c.txt", "train.schedule={decay: linear}"});
    EXPECT_EQ(recipe.model.path, "some/folder");
    EXPECT_FALSE(recipe.model.preset.has_value());
    EXPECT_EQ(recipe.model.num_layers, 4);
    EXPECT_EQ(recipe.data.path, std::vector<std::string>{"c.txt"});
    EXPECT_FALSE(recipe.data.packing);
    EXPECT_EQ(recipe.train.optimizer.lr, 3e-4);
    EXPECT_EQ(recipe.train.optimizer.betas[0], 0.8);
    EXPECT_EQ(recipe.train.accelerator.cp, 8);
    EXPECT_EQ(recipe.train.accelerator.ulysses_degree, 4);
    EXPECT_EQ(recipe.train.schedule.decay, "linear");
}

TEST(Recipe, UnknownKeysNameTheNearestAndTheLine) {
    EXPECT_EQ(refusal("train:\n  stepz: 3\n"),
              "r.yaml:2: unknown key train.stepz; did you mean train.steps?");
    EXPECT_EQ(refusal("model:\n  preset: tiny\ntrain:\n  accelerator:\n    cp: 2\n    cq: 3\n"),
              "r.yaml:6: unknown key train.accelerator.cq; did you mean train.accelerator.cp?");
    EXPECT_EQ(refusal("steps: 3\n"), "r.yaml:1: unknown key steps; did you mean train.steps?");
    EXPECT_EQ(refusal("train: {lr: 3}\n"),
              "r.yaml:1: unknown key train.lr; did you mean train.optimizer.lr?");
    EXPECT_EQ(refusal("", {"train.optimiser.lr=1"}),
              "override 'train.optimiser.lr=1': unknown key train.optimiser.lr; did you mean "
              "train.optimizer.lr?");
    EXPECT_EQ(refusal("log: {}\nlogs: {}\n"), "r.yaml:2: unknown key logs; did you mean log.dir?");
}

TEST(Recipe, WrongTypesAndRangesSayWhatIsAllowed) {
    EXPECT_EQ(refusal("train: {steps: many}\n"),
              "r.yaml:1: train.steps is many, but must be a whole number of at least 1");
    EXPECT_EQ(refusal("train: {steps: 0}\n"),
              "r.yaml:1: train.steps is 0, but must be a whole number of at least 1");
    EXPECT_EQ(refusal("train: {steps: 1.5}\n"),
              "r.yaml:1: train.steps is 1.5, but must be a whole number of at least 1");
    EXPECT_EQ(refusal("", {"train.optimizer.lr=-1"}),
              "override 'train.optimizer.lr=-1': train.optimizer.lr is -1, but must be a number of "
              "at least 0");
    EXPECT_EQ(
        refusal("", {"train.optimizer.lr=.nan"}),
        "override 'train.optimizer.lr=.nan': train.optimizer.lr is .nan, but must be a number "
        "of at least 0");
    EXPECT_EQ(
        refusal("train: {optimizer: {betas: [0.9, 1.0]}}\n"),
        "r.yaml:1: train.optimizer.betas is [0.9, 1.0], but must be a number of at least 0 and "
        "below 1");
    EXPECT_EQ(refusal("model: {dtype: fp16}\n"),
              "r.yaml:1: model.dtype is fp16, but must be one of bf16, fp32");
    EXPECT_EQ(refusal("data: {packing: 1}\n"),
              "r.yaml:1: data.packing is 1, but must be true or false");
    EXPECT_EQ(refusal("train: {steps: null}\n"),
              "r.yaml:1: train.steps is null, but must be a whole number of at least 1");
    EXPECT_EQ(refusal("train: 3\n"), "r.yaml:1: train is a block of keys, not a value");
    EXPECT_EQ(refusal("just a word\n"), "r.yaml:1: a recipe is a block of keys, not a value");
    EXPECT_EQ(refusal("train: {steps: 1}\ntrain: {steps: 2}\n"),
              "r.yaml:2: train.steps is given twice");
    EXPECT_EQ(refusal("", {"train.steps"}), "override 'train.steps': write key.path=value");
    EXPECT_NE(refusal("train: [\n").find("r.yaml:2: not valid YAML"), std::string::npos);
}

TEST(Recipe, WhatWouldBeIgnoredIsRefused) {
    EXPECT_NE(refusal("model: {path: a, preset: tiny}\n").find("model.preset would be ignored"),
              std::string::npos);
    EXPECT_NE(refusal("checkpoint: {every: 3}\n").find("checkpoint.every would be ignored"),
              std::string::npos);
    EXPECT_NE(refusal("data: {validation_path: a}\n").find("train.eval_every is 0"),
              std::string::npos);
    EXPECT_NE(refusal("train: {eval_every: 2}\n").find("needs data.validation_path"),
              std::string::npos);
    EXPECT_NE(refusal("train: {schedule: {decay: constant, min_lr_ratio: 0.5}}\n").find("ignored"),
              std::string::npos);
    EXPECT_NE(refusal("train: {global_batch_size: 5, accelerator: {dp: 2}}\n").find("that is: 6"),
              std::string::npos);
}

TEST(Recipe, TheWeightOfTheLoadBalancingLoss) {
    const auto config = [](const std::string& text) {
        return recipe_model_config(parse_recipe(text, "r.yaml").model);
    };
    EXPECT_EQ(config("model: {preset: tiny-moe}\n").router_aux_loss_coef, 0.001);
    EXPECT_EQ(config("model: {preset: tiny-moe, router_aux_loss_coef: 0.02, num_layers: 2}\n")
                  .router_aux_loss_coef,
              0.02);
    EXPECT_EQ(config("model: {preset: tiny-moe, router_aux_loss_coef: 0}\n").router_aux_loss_coef,
              0.0);
    EXPECT_THROW((void)config("model: {preset: tiny, router_aux_loss_coef: 0.02}\n"), UsageError);
    EXPECT_NE(refusal("model: {router_aux_loss_coef: -1}\n").find("at least 0"), std::string::npos);
}

TEST(Recipe, YamlReadsBackToTheSameRecipe) {
    const Recipe recipe = parse_recipe(
        "model: {path: 'a: b'}\ndata: {path: ['x y.txt', 'true']}\ncheckpoint: {dir: runs/a}\n"
        "train: {optimizer: {lr: 1.0e-3, eps: 1e-8}, accelerator: {fsdp: true}}\n",
        "r.yaml");
    const Recipe again = parse_recipe(to_yaml(recipe), "again.yaml");
    EXPECT_EQ(to_yaml(again), to_yaml(recipe));
    EXPECT_EQ(again.model.path, "a: b");
    EXPECT_EQ(again.train.optimizer.eps, 1e-8);
    EXPECT_EQ(recipe_hash(again), recipe_hash(recipe));
    EXPECT_NE(recipe_hash(parse_recipe("", "r.yaml")), recipe_hash(recipe));
}

}  // namespace
}  // namespace hybridcp
