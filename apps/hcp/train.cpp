#include "hcp/train.h"

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <iostream>
#include <numbers>

#include "core/files.h"
#include "hcp/session.h"
#include "hybridcp/error.h"
#include "hybridcp/model.h"
#include "train/checkpoint_manifest.h"
#include "train/checkpoint_reader.h"
#include "train/trainer.h"

namespace hybridcp::cli {

namespace {

// Set by the handler below, which may do no more than that.
std::atomic<bool> stop_requested = false;
static_assert(std::atomic<bool>::is_always_lock_free);

void request_stop(int /*signal_number*/) {
    stop_requested = true;
}

void take_signals() {
    struct sigaction action = {};
    action.sa_handler = request_stop;
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
}

void print_summary(const TrainReport& report, const std::string& resume) {
    if (report.last_step == report.first_step) {
        fmt::print("nothing to do: {} steps were finished before\n", report.first_step);
    } else {
        fmt::print("steps {} to {}: loss {:.4f} at the first, {:.4f} at the last",
                   report.first_step + 1, report.last_step, report.first_loss, report.last_loss);
        if (report.is_bytes) {
            fmt::print(" (bits per byte {:.3f}, {:.3f})", report.first_loss / std::numbers::ln2,
                       report.last_loss / std::numbers::ln2);
        }
        fmt::print("; {:.0f} tokens/s\n", report.tokens_per_second);
    }
    if (report.validation_loss) {
        fmt::print("validation loss: {:.4f}\n", *report.validation_loss);
    }
    for (const auto& [what, path] : {std::pair{"checkpoint", report.checkpoint_folder},
                                     {"metrics", report.metrics_path},
                                     {"loss curve", report.picture_path}}) {
        if (!path.empty()) {
            fmt::print("{}: {}\n", what, path);
        }
    }
    if (report.stopped_early) {
        const std::string how = resume == "auto"
                                    ? ": the same command goes on from there"
                                    : ": the same command with checkpoint.resume=auto goes on "
                                      "from there";
        fmt::print("stopped by a signal after step {}{}\n", report.last_step,
                   report.checkpoint_folder.empty() ? "" : how);
    }
    std::fflush(stdout);
}

}  // namespace

int train(const TrainRequest& request) {
    const LaunchEnvironment environment = read_launch_environment();
    const Recipe recipe = load_recipe(request.recipe_path, request.overrides);
    take_signals();
    select_device(recipe.train.accelerator.device, environment);
    Session session(environment, recipe.train.accelerator,
                    std::chrono::seconds(recipe.train.comm_timeout_seconds));
    const TrainReport report = run_training(
        recipe, session.mesh(),
        {.stop = &stop_requested, .out = &std::cout, .is_terminal = isatty(STDOUT_FILENO) == 1});
    return session.conclude([&] {
        print_summary(report, recipe.checkpoint.resume);
        return 0;
    });
}

int export_checkpoint(const ExportRequest& request) {
    if (request.dtype != "fp32" && request.dtype != "bf16") {
        throw UsageError(
            fmt::format("unknown dtype '{}': fp32 and bf16 can be exported", request.dtype));
    }
    if (path_exists(request.folder + "/" + kManifestFile)) {
        throw UsageError(
            fmt::format("{} is a checkpoint: export into another folder", request.folder));
    }
    std::string folder = request.checkpoint;
    std::optional<std::string> damage = checkpoint_damage(folder);
    if (damage) {
        std::vector<std::string> skipped;
        const std::optional<std::string> newest = latest_checkpoint(folder, skipped);
        for (const std::string& line : skipped) {
            fmt::print(stderr, "hcp: {}\n", line);
        }
        if (!newest) {
            throw FormatError(
                fmt::format("{} is no checkpoint and holds none: {}", folder, *damage));
        }
        folder = *newest;
    }
    const CheckpointReader reader(folder);
    save_parameters(reader, read_model_config(folder), request.folder,
                    request.dtype == "bf16" ? at::kBFloat16 : at::kFloat);
    fmt::print("{} -> {} ({}, {} tensors)\n", folder, request.folder, request.dtype,
               reader.manifest().parameters.size());
    return 0;
}

}  // namespace hybridcp::cli
