// The keys of a recipe, once: visit_recipe calls the visitor's section(name, body) and field(name,
// value, rule) for every key in the order in which they are printed. Included by the reader and the
// writer only.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "train/recipe.h"

namespace hybridcp::recipe_fields {

/// What a value may be, beyond its type. For lists, what each entry may be.
struct Rule {
    double minimum = -std::numeric_limits<double>::infinity();
    double maximum = std::numeric_limits<double>::infinity();
    bool minimum_is_allowed = true;
    bool maximum_is_allowed = true;
    std::vector<std::string> choices = {};  // of a word; empty: any
};

// Beyond any machine of today, and small enough that products of them fit 64 bits.
constexpr double kMostTokens = 1 << 30;  // of a row: labels are its next tokens, so two at least
constexpr double kMostRows = 1 << 24;
constexpr double kMostRanks = 1 << 15;

inline Rule at_least(double minimum) {
    return {.minimum = minimum};
}
inline Rule above(double minimum) {
    return {.minimum = minimum, .minimum_is_allowed = false};
}
inline Rule from_to(double minimum, double maximum) {
    return {minimum, maximum};
}
inline Rule from_to_below(double minimum, double maximum) {
    return {.minimum = minimum, .maximum = maximum, .maximum_is_allowed = false};
}
inline Rule one_of(std::vector<std::string> choices) {
    return {.choices = std::move(choices)};
}

template <typename Visitor>
void visit_model(Visitor& visitor, ModelRecipe& model) {
    visitor.field("path", model.path, Rule{});
    visitor.field("preset", model.preset, Rule{});
    visitor.field("num_layers", model.num_layers, at_least(1));
    visitor.field("dtype", model.dtype, one_of({"bf16", "fp32"}));
    visitor.field("router_aux_loss_coef", model.router_aux_loss_coef, at_least(0));
}

template <typename Visitor>
void visit_data(Visitor& visitor, DataRecipe& data) {
    visitor.field("path", data.path, Rule{});
    visitor.field("tokenizer", data.tokenizer, one_of({"bytes"}));
    visitor.field("sequence_length", data.sequence_length, from_to(2, kMostTokens));
    visitor.field("validation_path", data.validation_path, Rule{});
    visitor.field("packing", data.packing, Rule{});
}

/// Values of this block are checked by check_support, which knows the nearest supported choice.
template <typename Visitor>
void visit_accelerator(Visitor& visitor, ParallelOptions& options) {
    visitor.field("device", options.device, Rule{});
    visitor.field("dp", options.dp, from_to(1, kMostRanks));
    visitor.field("cp", options.cp, from_to(1, kMostRanks));
    visitor.field("tp", options.tp, at_least(1));
    visitor.field("fsdp", options.fsdp, Rule{});
    visitor.field("fsdp_shard_size", options.fsdp_shard_size, at_least(1));
    visitor.field("fsdp_prefetch", options.fsdp_prefetch, Rule{});
    visitor.field("ulysses_degree", options.ulysses_degree, at_least(1));
    visitor.field("full_attention_cp_mode", options.full_attention_cp_mode, Rule{});
    visitor.field("linear_attention_cp_mode", options.linear_attention_cp_mode, Rule{});
    visitor.field("linear_attention_gdn_backend", options.linear_attention_gdn_backend, Rule{});
    visitor.field("linear_attention_summary", options.linear_attention_summary, Rule{});
    visitor.field("sequence_layout", options.sequence_layout, Rule{});
    visitor.field("layout_cut", options.layout_cut, Rule{});
    visitor.field("linear_attention_layout", options.linear_attention_layout, Rule{});
    visitor.field("convert_to", options.convert_to, Rule{});
}

template <typename Visitor>
void visit_train(Visitor& visitor, TrainRecipe& train) {
    visitor.field("steps", train.steps, at_least(1));
    visitor.field("global_batch_size", train.global_batch_size, from_to(1, kMostRows));
    visitor.field("micro_batch_size", train.micro_batch_size, from_to(1, kMostRows));
    visitor.field("seed", train.seed, at_least(0));
    visitor.section("optimizer", [&] {
        visitor.field("name", train.optimizer.name, one_of({"adamw"}));
        visitor.field("lr", train.optimizer.lr, at_least(0));
        visitor.field("betas", train.optimizer.betas, from_to_below(0, 1));
        visitor.field("eps", train.optimizer.eps, above(0));
        visitor.field("weight_decay", train.optimizer.weight_decay, at_least(0));
    });
    visitor.section("schedule", [&] {
        visitor.field("warmup_steps", train.schedule.warmup_steps, at_least(0));
        visitor.field("decay", train.schedule.decay, one_of({"cosine", "linear", "constant"}));
        visitor.field("min_lr_ratio", train.schedule.min_lr_ratio, from_to(0, 1));
    });
    visitor.field("grad_clip", train.grad_clip, at_least(0));
    visitor.field("eval_every", train.eval_every, at_least(0));
    visitor.field("activation_checkpoint", train.activation_checkpoint,
                  one_of({"none", "full", "selective"}));
    visitor.field("gdn_chunk_size", train.gdn_chunk_size, from_to(1, 256));
    visitor.field("comm_timeout_seconds", train.comm_timeout_seconds, from_to(1, 7 * 24 * 3600));
    visitor.section("accelerator", [&] { visit_accelerator(visitor, train.accelerator); });
}

template <typename Visitor>
void visit_recipe(Visitor& visitor, Recipe& recipe) {
    visitor.section("model", [&] { visit_model(visitor, recipe.model); });
    visitor.section("data", [&] { visit_data(visitor, recipe.data); });
    visitor.section("train", [&] { visit_train(visitor, recipe.train); });
    visitor.section("checkpoint", [&] {
        visitor.field("dir", recipe.checkpoint.dir, Rule{});
        visitor.field("every", recipe.checkpoint.every, at_least(0));
        visitor.field("keep", recipe.checkpoint.keep, at_least(1));
        visitor.field("resume", recipe.checkpoint.resume, Rule{});
    });
    visitor.section("log", [&] {
        visitor.field("dir", recipe.log.dir, Rule{});
        visitor.field("every", recipe.log.every, at_least(1));
    });
}

}  // namespace hybridcp::recipe_fields
