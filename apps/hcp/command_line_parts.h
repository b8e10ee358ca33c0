// What the files that build the command line share.
#pragma once

#include <CLI/CLI.hpp>
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

inline void add_nproc(CLI::App* command, Request& request) {
    command->add_option(
        "--nproc", request.num_ranks,
        "start so many ranks on this machine (without it: torchrun's, Slurm's or Open MPI's)");
}

/// The commands under `hcp bench`.
void add_bench_commands(CLI::App& bench, Request& request);

}  // namespace hybridcp::cli
