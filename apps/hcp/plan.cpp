#include "hcp/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/files.h"
#include "hcp/terminal.h"
#include "hybridcp/error.h"
#include "train/memory_plan_input.h"
#include "train/memory_report.h"

namespace hybridcp::cli {

namespace {

constexpr std::size_t kBarWidth = 40;
constexpr std::size_t kMostAdvice = 6;
// Of the 256 colours, one for each class.
constexpr std::array<int, kNumMemoryClasses> kColors{75,  214, 120, 245, 219,
                                                     217, 228, 250, 123, 189};

std::string title_of(const Recipe& recipe, const plan::MemoryPlanInput& input) {
    std::string title = fmt::format(
        "{}, {} row{} of {} tokens a micro-batch, dp {} x cp {}, {}",
        recipe.model.path ? *recipe.model.path : recipe.model.preset.value(), input.rows,
        input.rows == 1 ? "" : "s", input.row_tokens, input.dp, input.cp, recipe.model.dtype);
    if (input.sharded) {
        title += fmt::format(", parameters over {} ranks", input.shard_size);
    }
    return title + ", activation checkpointing " + recipe.train.activation_checkpoint;
}

/// Largest first, without those that take nothing.
std::vector<std::size_t> ordered_classes(const plan::PeakMemory& peak) {
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < kNumMemoryClasses; ++i) {
        if (peak.class_peak_bytes.at(i) > 0) {
            order.push_back(i);
        }
    }
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return peak.at_peak_bytes.at(a) > peak.at_peak_bytes.at(b);
    });
    return order;
}

std::string bar_of(std::size_t index, const PlanText& plan) {
    const std::int64_t bytes = plan.peak.at_peak_bytes.at(index);
    const auto length = static_cast<std::size_t>(
        std::lround(static_cast<double>(kBarWidth) * static_cast<double>(bytes) /
                    static_cast<double>(std::max<std::int64_t>(plan.peak.total_bytes, 1))));
    const std::string bar(length, plan.color ? ' ' : '#');
    const std::string rest(kBarWidth - length, ' ');
    return plan.color && length > 0
               ? fmt::format("\x1b[48;5;{}m{}\x1b[0m{}", kColors.at(index), bar, rest)
               : bar + rest;
}

std::string verdict(std::int64_t bytes, std::int64_t hbm_bytes) {
    return bytes <= hbm_bytes ? fmt::format("{} left", bytes_text(hbm_bytes - bytes))
                              : fmt::format("{} too much", bytes_text(bytes - hbm_bytes));
}

std::string advice_text(const PlanText& plan) {
    std::string text;
    for (std::size_t i = 0; i < std::min(plan.advice.size(), kMostAdvice); ++i) {
        const plan::Advice& advice = plan.advice[i];
        text += fmt::format("  {:<56}{:>12}  {}\n", advice.change, bytes_text(advice.total_bytes),
                            verdict(advice.total_bytes, *plan.hbm_bytes));
    }
    return text.empty() ? "  no single change of the recipe lowers it\n" : text;
}

nlohmann::ordered_json to_json(const PlanText& plan) {
    nlohmann::ordered_json json{{"title", plan.title},
                                {"total_bytes", plan.peak.total_bytes},
                                {"moment", plan.peak.moment}};
    for (std::size_t i = 0; i < kNumMemoryClasses; ++i) {
        const std::string key(key_of(static_cast<MemoryClass>(i)));
        json["at_peak_bytes"][key] = plan.peak.at_peak_bytes.at(i);
        json["class_peak_bytes"][key] = plan.peak.class_peak_bytes.at(i);
    }
    if (plan.hbm_bytes) {
        json["hbm_bytes"] = *plan.hbm_bytes;
        json["fits"] = plan.peak.total_bytes <= *plan.hbm_bytes;
    }
    json["changes"] = nlohmann::ordered_json::array();
    for (const plan::Advice& advice : plan.advice) {
        json["changes"].push_back({{"change", advice.change}, {"total_bytes", advice.total_bytes}});
    }
    return json;
}

/// Whether a recipe changed so is accepted: advice must not break another rule.
bool is_accepted(const PlanOptions& options, const plan::Advice& advice) {
    std::vector<std::string> overrides = options.overrides;
    overrides.push_back(advice.change.substr(0, advice.change.find(' ')));
    try {
        (void)memory_plan_input(load_recipe(options.recipe_path, overrides));
        return true;
    } catch (const UsageError&) {
        return false;
    }
}

}  // namespace

std::int64_t parse_bytes(const std::string& text) {
    std::size_t end = 0;
    double number = -1;
    try {
        number = std::stod(text, &end);
    } catch (const std::exception&) {
        end = 0;
    }
    std::string unit;
    for (const char c : text.substr(end)) {
        if (c != ' ') {
            unit += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
        }
    }
    constexpr std::array<std::pair<const char*, double>, 4> kUnits{
        {{"GB", 1e9}, {"GIB", 1073741824.0}, {"MB", 1e6}, {"MIB", 1048576.0}}};
    const auto* const found = std::find_if(kUnits.begin(), kUnits.end(),
                                           [&](const auto& each) { return unit == each.first; });
    if (end == 0 || found == kUnits.end() || !(number > 0 && number < 1e6)) {
        throw UsageError(
            fmt::format("--hbm: '{}' is not a size: write 80GB, 74.5GiB or 512MB", text));
    }
    return static_cast<std::int64_t>(number * found->second);
}

std::string to_text(const PlanText& plan) {
    std::string text = fmt::format("memory of each rank: {}\n{:<26}{:>12}  {:<{}}{:>12}\n",
                                   plan.title, "", "at the peak", "", kBarWidth, "own peak");
    for (const std::size_t i : ordered_classes(plan.peak)) {
        text += fmt::format("  {:<24}{:>12}  {}{:>12}\n", name_of(static_cast<MemoryClass>(i)),
                            bytes_text(plan.peak.at_peak_bytes.at(i)), bar_of(i, plan),
                            bytes_text(plan.peak.class_peak_bytes.at(i)));
    }
    text += fmt::format("  {:<24}{:>12}  in the {}\n", "total", bytes_text(plan.peak.total_bytes),
                        plan.peak.moment);
    if (!plan.hbm_bytes) {
        return text;
    }
    const bool fits = plan.peak.total_bytes <= *plan.hbm_bytes;
    text +=
        fmt::format("{} {}: {}\n", fits ? "it fits" : "it does not fit",
                    bytes_text(*plan.hbm_bytes), verdict(plan.peak.total_bytes, *plan.hbm_bytes));
    return fits ? text : text + "single changes that help, the best first:\n" + advice_text(plan);
}

int run_plan(const PlanOptions& options) {
    const bool color = wants_color(options.color);
    const Recipe recipe = load_recipe(options.recipe_path, options.overrides);
    const plan::MemoryPlanInput input = memory_plan_input(recipe);
    if (options.num_ranks && *options.num_ranks != input.dp * input.cp) {
        throw UsageError(fmt::format(
            "--nproc {}: the recipe is for {} ranks (train.accelerator.dp {} times cp {}): change "
            "one of them, or leave --nproc out",
            *options.num_ranks, input.dp * input.cp, input.dp, input.cp));
    }
    PlanText plan{.title = title_of(recipe, input), .peak = plan_memory(input), .color = color};
    if (!options.hbm.empty()) {
        plan.hbm_bytes = parse_bytes(options.hbm);
    }
    plan.advice = memory_advice(input);
    std::erase_if(plan.advice, [&](const auto& each) { return !is_accepted(options, each); });
    if (!options.report_path.empty()) {
        write_file_atomically(options.report_path, to_json(plan).dump(2) + "\n");
    }
    fmt::print("{}", to_text(plan));
    std::fflush(stdout);
    return plan.hbm_bytes && plan.peak.total_bytes > *plan.hbm_bytes ? 1 : 0;
}

}  // namespace hybridcp::cli
