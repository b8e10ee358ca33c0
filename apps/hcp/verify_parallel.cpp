#include "hcp/verify_parallel.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <memory>
#include <set>

#include "hcp/compare.h"
#include "hcp/report.h"
#include "hcp/session.h"
#include "hybridcp/error.h"
#include "train/checkpoint_reader.h"
#include "train/model_setup.h"
#include "train/trainer.h"

namespace hybridcp::cli {

namespace {

// docs/numerics.md, section "training on many ranks": relative, at each step.
struct StepBars {
    double loss = 0.0;
    double grad_norm = 0.0;
};
constexpr StepBars kFp32Bars{1e-5, 1e-5};
constexpr StepBars kBf16Bars{3.7e-4, 3.9e-3};
constexpr double kChunkFactor = 2.0;
constexpr std::size_t kPrintedSteps = 8;

struct Curve {
    std::vector<double> loss, grad_norm;
    std::string checkpoint;  // of the final parameters
};

/// A folder that goes with its owner.
class TemporaryFolder {
  public:
    TemporaryFolder() {
        std::string pattern =
            (std::filesystem::temp_directory_path() / "hcp-verify-XXXXXX").string();
        if (mkdtemp(pattern.data()) == nullptr) {
            throw FormatError(fmt::format(
                "cannot make a folder {}: set TMPDIR to one that can be written", pattern));
        }
        path_ = pattern;
    }
    ~TemporaryFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    [[nodiscard]] const std::string& path() const { return path_; }

  private:
    std::string path_;
};

Curve train_once(Recipe recipe, const Mesh& mesh, const std::string& folder) {
    recipe.checkpoint = {.dir = folder, .every = 0, .keep = 1, .resume = "never"};
    recipe.log.dir = std::nullopt;
    Curve curve;
    const TrainReport report = run_training(recipe, mesh,
                                            {.out = &std::cout,
                                             .is_terminal = isatty(STDOUT_FILENO) == 1,
                                             .on_step = [&](const StepMetrics& metrics) {
                                                 curve.loss.push_back(metrics.loss);
                                                 curve.grad_norm.push_back(metrics.grad_norm);
                                             }});
    curve.checkpoint = report.checkpoint_folder;
    return curve;
}

Curve train_alone(Recipe recipe, const std::string& folder) {
    if (recipe_model_config(recipe.model).has_experts()) {
        // The load-balancing loss is one of each micro-batch over all ranks (docs/moe.md).
        recipe.train.micro_batch_size *= recipe.train.accelerator.dp;
    }
    recipe.train.accelerator = on_one_rank(recipe.train.accelerator);
    return train_once(recipe, one_rank_mesh(recipe.train.accelerator.device), folder);
}

std::vector<double> relative_differences(const std::vector<double>& actual,
                                         const std::vector<double>& reference) {
    std::vector<double> differences;
    for (std::size_t step = 0; step < reference.size(); ++step) {
        differences.push_back(std::abs(actual.at(step) - reference[step]) /
                              std::abs(reference[step]));
    }
    return differences;
}

/// The bar of every step: `fixed`, or twice the largest difference so far of the runs that differ
/// in chunk size.
std::vector<double> step_bars(double fixed,
                              const std::vector<double>& chunk_differences,
                              std::size_t num_steps) {
    std::vector<double> bars(num_steps, fixed);
    double largest = 0.0;
    for (std::size_t step = 0; step < chunk_differences.size(); ++step) {
        largest = std::max(largest, chunk_differences[step]);
        bars[step] = std::max(fixed, kChunkFactor * largest);
    }
    return bars;
}

/// One measure of the two runs.
struct Comparison {
    std::string name;
    std::vector<double> differences;
    std::vector<double> bars;
    [[nodiscard]] std::size_t worst_step() const {
        std::size_t worst = 0;
        for (std::size_t step = 1; step < differences.size(); ++step) {
            if (!(differences[step] / bars[step] <= differences[worst] / bars[worst])) {
                worst = step;
            }
        }
        return worst;
    }
    /// The largest difference in each quarter of the run: a drift shows as growth.
    [[nodiscard]] std::string by_quarters() const {
        std::vector<std::string> quarters;
        const std::size_t count = differences.size();
        for (std::size_t quarter = 0; quarter < 4; ++quarter) {
            const auto begin =
                differences.begin() + static_cast<std::ptrdiff_t>(quarter * count / 4);
            const auto end =
                differences.begin() + static_cast<std::ptrdiff_t>((quarter + 1) * count / 4);
            quarters.push_back(begin == end ? "-"
                                            : fmt::format("{:.1e}", *std::max_element(begin, end)));
        }
        return fmt::format("{}: {}", name, fmt::join(quarters, " "));
    }
};

struct Comparisons {
    Comparison loss, grad_norm;
};

void print_steps(const Curve& all, const Curve& one, const Comparisons& comparisons) {
    const std::size_t count = one.loss.size();
    std::set<std::size_t> printed = {0, count - 1, comparisons.loss.worst_step(),
                                     comparisons.grad_norm.worst_step()};
    for (std::size_t step = 0; step < count;
         step += std::max<std::size_t>(1, count / kPrintedSteps)) {
        printed.insert(step);
    }
    fmt::print("\n  {:>5}  {:>12}  {:>12}  {:>8}  {:>12}  {:>12}  {:>8}\n", "step", "loss",
               "one rank", "rel", "grad norm", "one rank", "rel");
    for (const std::size_t step : printed) {
        fmt::print("  {:>5}  {:>12.7f}  {:>12.7f}  {:>8.1e}  {:>12.7f}  {:>12.7f}  {:>8.1e}\n",
                   step + 1, all.loss[step], one.loss[step], comparisons.loss.differences[step],
                   all.grad_norm[step], one.grad_norm[step],
                   comparisons.grad_norm.differences[step]);
    }
    fmt::print("\n");
}

double parameter_difference(const std::string& folder, const std::string& reference_folder) {
    const CheckpointReader actual(folder);
    const CheckpointReader reference(reference_folder);
    double error = 0.0;
    double norm = 0.0;
    for (const auto& [name, parameter] : reference.manifest().parameters) {
        const at::Tensor expected = reference.value(name).to(at::kDouble);
        error += (actual.value(name).to(at::kDouble) - expected).square().sum().item<double>();
        norm += expected.square().sum().item<double>();
    }
    return std::sqrt(error / norm);
}

Report make_report(const Recipe& recipe,
                   const Curve& all,
                   const Curve& one,
                   const Comparisons& comparisons) {
    Report report(
        fmt::format("{} steps: {}, against one rank", one.loss.size(), describe_run(recipe)));
    nlohmann::json steps;
    for (const Comparison* comparison : {&comparisons.loss, &comparisons.grad_norm}) {
        const std::size_t worst = comparison->worst_step();
        report.add({.tensor = comparison->name,
                    .measure = "relative",
                    .error = comparison->differences[worst],
                    .bar = comparison->bars[worst],
                    .where = fmt::format("step {}", worst + 1)});
        steps[comparison->name + "_relative_difference"] = comparison->differences;
        steps[comparison->name + "_bar"] = comparison->bars;
    }
    report.add_note(fmt::format("largest difference in each quarter of the run: {}; {}",
                                comparisons.loss.by_quarters(),
                                comparisons.grad_norm.by_quarters()));
    const double parameters = parameter_difference(all.checkpoint, one.checkpoint);
    report.add_note(
        fmt::format("final parameters differ by {:.1e} (rel-L2 of all together)", parameters));
    steps["loss"] = all.loss;
    steps["loss_one_rank"] = one.loss;
    steps["grad_norm"] = all.grad_norm;
    steps["grad_norm_one_rank"] = one.grad_norm;
    report.attach("steps", steps);
    report.attach("final_parameter_rel_l2", parameters);
    return report;
}

/// Rank 0: the run on one rank, and with --chunk-bar another one that differs in chunk size alone.
int judge(const Recipe& recipe,
          const VerifyParallelOptions& options,
          const Curve& all,
          const std::string& folder) {
    fmt::print("training on one rank\n");
    const Curve one = train_alone(recipe, folder + "/one");
    std::vector<double> chunk_loss, chunk_grad_norm;
    if (options.chunk_bar) {
        Recipe other = recipe;
        other.train.gdn_chunk_size = recipe.train.gdn_chunk_size == 32 ? 64 : 32;
        fmt::print("training on one rank with chunks of {} tokens\n", other.train.gdn_chunk_size);
        const Curve curve = train_alone(other, folder + "/chunk");
        chunk_loss = relative_differences(curve.loss, one.loss);
        chunk_grad_norm = relative_differences(curve.grad_norm, one.grad_norm);
    }
    const StepBars fixed = recipe.model.dtype == "bf16" ? kBf16Bars : kFp32Bars;
    const std::size_t count = one.loss.size();
    const Comparisons comparisons{
        .loss = {"loss", relative_differences(all.loss, one.loss),
                 step_bars(fixed.loss, chunk_loss, count)},
        .grad_norm = {"grad_norm", relative_differences(all.grad_norm, one.grad_norm),
                      step_bars(fixed.grad_norm, chunk_grad_norm, count)}};
    print_steps(all, one, comparisons);
    return finish_reports({make_report(recipe, all, one, comparisons)}, options.report_path);
}

}  // namespace

int verify_parallel(const VerifyParallelOptions& options) {
    const LaunchEnvironment environment = read_launch_environment();
    const Recipe recipe = load_recipe(options.recipe_path, options.overrides);
    const ParallelOptions& accelerator = recipe.train.accelerator;
    if (options.chunk_bar && recipe.model.dtype == "bf16") {
        throw UsageError("--chunk-bar widens the fp32 bar: leave it out with model.dtype bf16");
    }
    select_device(accelerator.device, environment);
    Session session(environment, accelerator,
                    std::chrono::seconds(recipe.train.comm_timeout_seconds));
    // All ranks write the final parameters, into a folder that rank 0 makes under TMPDIR.
    const auto scratch = session.rank() == 0 ? std::make_unique<TemporaryFolder>() : nullptr;
    const std::string folder = session.text_of_rank_0("scratch", scratch ? scratch->path() : "");
    if (session.rank() == 0) {
        fmt::print("training on {} ranks\n", session.num_ranks());
    }
    const Curve all = train_once(recipe, session.mesh(), folder + "/all");
    return session.conclude([&] { return judge(recipe, options, all, folder); });
}

}  // namespace hybridcp::cli
