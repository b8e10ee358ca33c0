// What tests of `hcp train` as processes share: a tiny run, its losses, its ranks.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/process.h"

namespace hybridcp::testing {

/// A tiny run in `folder`: two layers' worth of work a step, text that the test makes up.
inline std::string write_recipe(const ScratchFolder& folder, int steps) {
    std::string text;
    for (int i = 0; i < 4000; ++i) {
        text += "line " + std::to_string(i * i % 977) + (i % 7 == 0 ? "\n" : " ");
    }
    write_text(folder / "text.txt", text);
    write_text(folder / "recipe.yaml",
               "model: {preset: tiny, num_layers: 4, dtype: fp32}\n"
               "data: {path: [" +
                   folder / "text.txt" +
                   "], sequence_length: 96}\n"
                   "train:\n"
                   "  steps: " +
                   std::to_string(steps) +
                   "\n"
                   "  global_batch_size: 1\n"
                   "  schedule: {warmup_steps: 2}\n"
                   "  comm_timeout_seconds: 60\n"
                   "  accelerator: {cp: 2, linear_attention_cp_mode: p2p, full_attention_cp_mode: "
                   "all_gather}\n"
                   "checkpoint: {dir: " +
                   folder / "run" +
                   ", every: 0, keep: 2}\n"
                   "log: {dir: " +
                   folder / "run" + "}\n");
    return folder / "recipe.yaml";
}

inline std::map<int, double> losses(const ScratchFolder& folder) {
    std::map<int, double> all;
    std::ifstream stream(folder / "run/metrics.jsonl");
    for (std::string line; std::getline(stream, line);) {
        const auto entry = nlohmann::json::parse(line, nullptr, false);
        if (!entry.is_discarded() && entry.contains("loss")) {
            all[entry.at("step").get<int>()] = entry.at("loss").get<double>();
        }
    }
    return all;
}

inline bool wait_for_step(const ScratchFolder& folder, int step) {
    for (int attempt = 0; attempt < 3000; ++attempt) {
        if (losses(folder).count(step) != 0) {
            return true;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
}

/// The process of one rank, found among the launcher's children by its environment.
inline pid_t rank_process(pid_t launcher, int rank) {
    std::istringstream children(read_text("/proc/" + std::to_string(launcher) + "/task/" +
                                          std::to_string(launcher) + "/children"));
    for (pid_t child = 0; children >> child;) {
        const std::string environment = read_text("/proc/" + std::to_string(child) + "/environ");
        if (environment.find("RANK=" + std::to_string(rank) + '\0') == 0) {
            return child;
        }
    }
    return -1;
}

}  // namespace hybridcp::testing
