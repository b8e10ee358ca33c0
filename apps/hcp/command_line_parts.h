// What the files that build the command line share.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>

#include "hcp/command_line.h"

namespace hybridcp::cli {

inline constexpr const char* kOverrideHelp =
    "key.path=value, laid over the recipe; e.g. train.accelerator.linear_attention_cp_mode=p2p";

inline void examples(CLI::App* command, const std::string& text) {
    command->footer("Examples:\n" + text);
}

/// A list in one word, so that a recipe may follow.
inline CLI::Option* comma_separated(CLI::Option* option) {
    return option->delimiter(',')->allow_extra_args(false);
}

/// --report FILE, refused at once where it could not be written after hours of work.
inline void add_report(CLI::App* command, std::string& path, const std::string& help) {
    command->add_option("--report", path, help)->check([](const std::string& file) {
        const std::filesystem::path parent = std::filesystem::path(file).parent_path();
        std::error_code none;
        if (std::filesystem::is_directory(file, none)) {
            return file + " is a folder: name a file";
        }
        if (!parent.empty() && !std::filesystem::is_directory(parent, none)) {
            return "there is no folder " + parent.string();
        }
        return std::string();
    });
}

inline void add_nproc(CLI::App* command, Request& request) {
    command->add_option(
        "--nproc", request.num_ranks,
        "start so many ranks on this machine (without it: torchrun's, Slurm's or Open MPI's)");
}

/// The commands under `hcp bench`.
void add_bench_commands(CLI::App& bench, Request& request);

}  // namespace hybridcp::cli
