// `hcp plan`: what a recipe's step would take on each rank, before anything is started.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/memory_plan.h"

namespace hybridcp::cli {

struct PlanOptions {
    std::string recipe_path;
    std::vector<std::string> overrides = {};
    std::string hbm = {};                         // a device's memory, "80GB"; empty: not compared
    std::optional<int> num_ranks = std::nullopt;  // those that will be started
    std::string color = "auto";
    std::string report_path = {};
};

/// Returns the exit status: 1 when the memory does not do. Errors: UsageError for a recipe, a size
/// or a number of ranks that is wrong; FormatError when the report cannot be written.
[[nodiscard]] int run_plan(const PlanOptions& options);

/// "80GB", "53.3 GB", "141GiB", "512MB" in bytes. Errors: UsageError for anything else.
[[nodiscard]] std::int64_t parse_bytes(const std::string& text);

/// What is printed.
struct PlanText {
    std::string title;
    plan::PeakMemory peak;
    std::optional<std::int64_t> hbm_bytes = std::nullopt;
    std::vector<plan::Advice> advice = {};
    bool color = false;
};
[[nodiscard]] std::string to_text(const PlanText& plan);

}  // namespace hybridcp::cli
