#include "hcp/bench_train.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/files.h"
#include "hcp/bench_measure.h"
#include "hcp/session.h"
#include "hybridcp/error.h"
#include "train/model_setup.h"
#include "train/tensor_memory.h"
#include "train/trained_model.h"

namespace hybridcp::cli {

namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::json;

// Relative, as `verify parallel` has them (docs/numerics.md).
constexpr double kFp32Bar = 1e-5;
constexpr double kBf16LossBar = 3.7e-4;
constexpr double kBf16NormBar = 3.9e-3;
constexpr double kLearningRate = 1e-5;

struct Variant {
    const char* name;
    bool sharded;
    bool prefetch;
    const char* activation_checkpoint;  // null: the recipe's
};

constexpr std::array kVariants{
    Variant{"whole", false, false, nullptr},
    Variant{"sharded", true, true, nullptr},
    Variant{"sharded-no-prefetch", true, false, nullptr},
    Variant{"whole-full", false, false, "full"},
    Variant{"whole-selective", false, false, "selective"},
    Variant{"sharded-full", true, true, "full"},
};

std::vector<Variant> chosen_variants(const std::vector<std::string>& names) {
    std::vector<std::string> known;
    for (const Variant& variant : kVariants) {
        known.emplace_back(variant.name);
    }
    std::vector<Variant> chosen;
    for (const std::string& name : names) {
        check_word("bench train --variants", name, known);
        chosen.push_back(kVariants.at(
            static_cast<std::size_t>(std::find(known.begin(), known.end(), name) - known.begin())));
    }
    return chosen;
}

/// A variant's model, and what its steps cost.
struct Lane {
    Variant variant;
    std::unique_ptr<TrainedModel> trained;
    std::vector<double> step_ms = {};  // of the slowest rank
    std::vector<double> losses = {}, norms = {};
    std::int64_t state_bytes = 0;                   // parameters, optimizer, sharded gradients
    std::int64_t peak_bytes = 0;                    // that a step allocates on top
    std::map<std::string, OpTraffic> traffic = {};  // of one step
};

class BenchTrain {
  public:
    BenchTrain(const BenchTrainOptions& options, const Recipe& recipe, const Mesh& mesh)
        : options_(options),
          recipe_(recipe),
          mesh_(mesh),
          parallel_(make_parallel(recipe.train.accelerator,
                                  recipe_model_config(recipe.model).head_counts(),
                                  recipe.model.dtype)) {
        const auto source = parameter_source(recipe);
        for (const Variant& variant : chosen_variants(options.variants)) {
            TrainedModelOptions model = trained_model_options(recipe, parallel_);
            model.sharded = variant.sharded;
            model.prefetch = variant.prefetch;
            if (variant.activation_checkpoint != nullptr) {
                model.activation_checkpoint =
                    activation_checkpoint_of(variant.activation_checkpoint);
            }
            const TensorMemory memory;
            lanes_.push_back({variant, std::make_unique<TrainedModel>(model, *source, mesh)});
            lanes_.back().state_bytes = memory.live_bytes();
        }
    }

    void run() {
        for (int turn = 0; turn < warm_up_ + options_.repeats; ++turn) {
            if (turn == warm_up_) {
                verify();
            }
            for (Lane& lane : lanes_) {
                step(lane, turn);
            }
        }
    }

    /// Comm: the most of all ranks.
    [[nodiscard]] Json results() const {
        Json all = Json::array();
        for (const Lane& lane : lanes_) {
            std::int64_t bytes = 0;
            Json ops = Json::object();
            for (const auto& [op, traffic] : lane.traffic) {
                bytes += traffic.bytes;
                ops[op] = {{"messages", traffic.messages}, {"bytes", traffic.bytes}};
            }
            at::Tensor most =
                at::tensor({bytes, lane.state_bytes, lane.peak_bytes}, at::kLong).to(mesh_.device);
            mesh_.world->all_reduce_max("bench", most);
            all.push_back({{"name", lane.variant.name},
                           {"median_ms", median(lane.step_ms)},
                           {"min_ms", smallest(lane.step_ms)},
                           {"megabytes_sent", most[0].item<double>() / 1e6},
                           {"state_megabytes", most[1].item<double>() / 1e6},
                           {"peak_megabytes", most[2].item<double>() / 1e6},
                           {"ops_of_rank_0", ops}});
        }
        return all;
    }

  private:
    /// The same tokens for every variant.
    [[nodiscard]] std::vector<TokenBatch> batches_of(int turn) const {
        const std::int64_t vocabulary = recipe_model_config(recipe_.model).vocab_size;
        const std::int64_t size = recipe_.train.micro_batch_size;
        std::vector<TokenBatch> batches;
        for (std::int64_t row = mesh_.dp->rank() * size; row < recipe_.train.global_batch_size;
             row += parallel_.dp * size) {
            at::manual_seed(static_cast<std::uint64_t>(turn * 1000 + row));
            const at::Tensor tokens =
                at::randint(vocabulary, {size, recipe_.data.sequence_length + 1}, at::kLong);
            batches.push_back(batch_from_rows(tokens.narrow(1, 0, recipe_.data.sequence_length),
                                              tokens.narrow(1, 1, recipe_.data.sequence_length)));
        }
        return batches;
    }

    void step(Lane& lane, int turn) {
        const std::vector<TokenBatch> batches = batches_of(turn);
        if (lane.trained->shards() == nullptr) {  // else the step frees what it is not charged with
            for (const ParameterPiece& piece : lane.trained->pieces()) {
                at::Tensor(piece.value).mutable_grad().reset();
            }
        }
        mesh_.world->barrier("bench");
        mesh_.reset_recorders();
        const TensorMemory memory;
        const Clock::time_point start = Clock::now();
        const StepLoss loss = lane.trained->forward_backward(batches, parallel_);
        const double norm = lane.trained->update(kLearningRate, recipe_.train.grad_clip);
        at::Tensor ms =
            at::full({1}, std::chrono::duration<double, std::milli>(Clock::now() - start).count(),
                     at::TensorOptions(mesh_.device).dtype(at::kDouble));
        lane.traffic = mesh_.traffic();
        mesh_.world->all_reduce_max("bench", ms);
        lane.losses.push_back(loss.loss);
        lane.norms.push_back(norm);
        if (turn >= warm_up_) {
            lane.step_ms.push_back(ms.item<double>());
            lane.peak_bytes = std::max(lane.peak_bytes, memory.peak_bytes());
        }
    }

    /// The numbers are the same on all ranks, and so is the verdict.
    void verify() const {
        const bool is_bf16 = recipe_.model.dtype == "bf16";
        for (const Lane& lane : lanes_) {
            for (std::size_t i = 0; i < lane.losses.size(); ++i) {
                const double loss = std::abs(lane.losses[i] / lanes_.front().losses[i] - 1.0);
                const double norm = std::abs(lane.norms[i] / lanes_.front().norms[i] - 1.0);
                if (!(loss <= (is_bf16 ? kBf16LossBar : kFp32Bar) &&
                      norm <= (is_bf16 ? kBf16NormBar : kFp32Bar))) {
                    throw NumericsError(fmt::format(
                        "bench train: {} is not {}: at step {} the loss is off by {:.1e}, the "
                        "gradient norm by {:.1e}",
                        lane.variant.name, lanes_.front().variant.name, i, loss, norm));
                }
            }
        }
    }

    const BenchTrainOptions& options_;
    const int warm_up_ = std::max(options_.warm_up, 1);  // verified before any is timed
    const Recipe& recipe_;
    const Mesh& mesh_;
    Parallel parallel_;
    std::vector<Lane> lanes_;
};

void print_table(const Json& variants) {
    fmt::print("{:<22} {:>10} {:>10} {:>9} {:>10} {:>10} {:>10}\n", "variant", "median ms", "min",
               "vs first", "MB sent", "state MB", "peak MB");
    const double first = variants.at(0).at("median_ms").get<double>();
    for (const Json& variant : variants) {
        const double ms = variant.at("median_ms").get<double>();
        fmt::print("{:<22} {:>10.1f} {:>10.1f} {:>8.2f}x {:>10.2f} {:>10.1f} {:>10.1f}\n",
                   variant.at("name").get<std::string>(), ms, variant.at("min_ms").get<double>(),
                   ms / first, variant.at("megabytes_sent").get<double>(),
                   variant.at("state_megabytes").get<double>(),
                   variant.at("peak_megabytes").get<double>());
    }
}

}  // namespace

int bench_train(const BenchTrainOptions& options) {
    const LaunchEnvironment environment = read_launch_environment();
    std::vector<std::string> overrides = options.overrides;
    overrides.emplace_back("train.accelerator.fsdp=true");  // the mesh has the axes of both
    const Recipe recipe = load_recipe(options.recipe_path, overrides);
    select_device(recipe.train.accelerator.device, environment);
    Session session(environment, recipe.train.accelerator,
                    std::chrono::seconds(recipe.train.comm_timeout_seconds));
    BenchTrain bench(options, recipe, session.mesh());
    bench.run();
    const Json variants = bench.results();
    return session.conclude([&] {
        fmt::print("{}; {}; {} rows of {} tokens\n", cpu_name(), describe_run(recipe),
                   recipe.train.global_batch_size, recipe.data.sequence_length);
        print_table(variants);
        if (!options.report_path.empty()) {
            const Json report{{"cpu", cpu_name()},
                              {"version", HCP_VERSION},
                              {"recipe", to_yaml(recipe)},
                              {"repeats", options.repeats},
                              {"variants", variants}};
            write_file_atomically(options.report_path, report.dump(2) + "\n");
        }
        return 0;
    });
}

}  // namespace hybridcp::cli
