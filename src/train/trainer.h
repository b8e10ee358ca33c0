// The training loop: data, step, optimizer, validation, checkpoints, metrics. Every rank of the
// mesh calls it; rank 0 alone prints and writes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>

#include "train/mesh.h"
#include "train/metrics.h"
#include "train/recipe.h"

namespace hybridcp {

struct TrainOptions {
    /// Set (by a signal handler) to end the run: the step is finished, a checkpoint is saved.
    const std::atomic<bool>* stop = nullptr;
    std::ostream* out = nullptr;  // for progress, on rank 0; none: silent
    bool is_terminal = false;     // of `out`
    std::function<void(const StepMetrics&)> on_step =
        nullptr;  // called on every rank after each step
};

struct TrainReport {
    std::int64_t first_step = 0;  // updates finished before this run: above 0 when it resumed
    std::int64_t last_step = 0;   // and after it
    bool stopped_early = false;
    double first_loss = 0.0;  // of this run's steps: cross-entropy alone
    double last_loss = 0.0;
    bool is_bytes = false;                                 // losses / ln 2 are bits per byte
    std::optional<double> validation_loss = std::nullopt;  // the last one, cross-entropy alone
    double tokens_per_second = 0.0;      // of all ranks, mean over this run's steps
    std::string checkpoint_folder = {};  // the newest; empty without
    std::string metrics_path = {};
    std::string picture_path = {};
};

/// Trains as the recipe says. Errors: UsageError before any exchange for a choice that is not
/// supported; FormatError for a bad file; NumericsError naming step and layer; CommError when a
/// rank is gone. A failure on one rank is a failure on every rank.
[[nodiscard]] TrainReport run_training(const Recipe& recipe,
                                       const Mesh& mesh,
                                       const TrainOptions& options = {});

}  // namespace hybridcp
