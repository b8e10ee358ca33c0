// One rank of `hcp bench cp`: verifies each variant against one rank, then times them by turns.

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <ctime>

#include "core/files.h"
#include "hcp/bench_cp.h"
#include "hcp/session.h"
#include "hybridcp/error.h"
#include "ops/context_parallel.h"
#include "ops/conversion.h"
#include "train/model_setup.h"
#include "train/shared_work.h"
#include "train/step.h"
#include "train/tensor_memory.h"

namespace hybridcp::cli {

namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::json;

// Relative, as `verify parallel` has them (docs/numerics.md): loss, and norm of the gradient.
struct Bars {
    double loss = 0.0;
    double gradient_norm = 0.0;
};
constexpr Bars kFp32Bars{1e-5, 1e-5};
constexpr Bars kBf16Bars{3.7e-4, 3.9e-3};
constexpr double kFp32GradientBar = 1e-4;  // rel-L2 of all gradients: golden data, section 8

double process_cpu_seconds() {
    timespec time{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

/// What one variant costs, over its repeats.
struct Measured {
    std::vector<double> step_ms;  // of the slowest rank
    double cpu_seconds = 0.0;     // of this rank
    double conversion_seconds = 0.0;
    std::int64_t peak_bytes = 0;
    std::map<std::string, OpTraffic> traffic;  // of one step
};

class Worker {
  public:
    Worker(const BenchCpOptions& options, const Recipe& recipe, Session& session)
        : options_(options),
          recipe_(recipe),
          mesh_(session.mesh()),
          model_(make_model(recipe)),
          batch_(random_batch()) {
        for (const auto& group : {mesh_.world, mesh_.cp, mesh_.dp}) {
            group->recorder().set_cpu_clock(CpuClock::kProcess);
        }
    }

    Json run(const std::vector<BenchVariant>& variants) {
        make_reference();
        for (const BenchVariant& variant : variants) {
            verify(variant);
        }
        std::vector<Measured> measured(variants.size());
        for (int i = 0; i < options_.warm_up + options_.repeats; ++i) {
            for (std::size_t v = 0; v < variants.size(); ++v) {
                measure(variants[v].parallel, i < options_.warm_up, measured[v]);
            }
        }
        Json result{{"ranks", mesh_.cp->size()}, {"variants", Json::array()}};
        for (std::size_t v = 0; v < variants.size(); ++v) {
            result["variants"].push_back(summary(variants[v].name, measured[v]));
        }
        return result;
    }

    /// A step on one rank, and the part of it that the linear mixers take: each runs forward and
    /// backward alone, on inputs of the same shape.
    Json run_alone() {
        const Parallel parallel = one_rank();
        std::vector<double> step_ms, linear_ms;
        for (int i = 0; i < options_.warm_up + options_.repeats; ++i) {
            const double whole = milliseconds([&] { step(parallel); });
            const double linear = milliseconds([&] { run_linear_mixers(parallel, 0); });
            if (i >= options_.warm_up) {
                step_ms.push_back(whole);
                linear_ms.push_back(linear);
            }
        }
        const double one_rank = at_quantile(step_ms, 0.5);
        const double mixers = at_quantile(linear_ms, 0.5);
        return {{"one_rank_ms", one_rank},
                {"linear_ms", mixers},
                {"linear_share", options_.level == "layer" ? 1.0 : mixers / one_rank},
                {"tokens", batch_.token_ids.numel()},
                {"documents", batch_.document_lengths},
                {"dtype", recipe_.model.dtype},
                {"level", options_.level}};
    }

  private:
    /// One rank with the recipe's kernels: what the variants are held against.
    [[nodiscard]] Parallel one_rank() const {
        return make_parallel(on_one_rank(recipe_.train.accelerator), model_.config().head_counts(),
                             recipe_.model.dtype);
    }

    [[nodiscard]] TokenBatch random_batch() const {
        TokenBatch batch;
        batch.document_lengths = options_.documents;
        if (batch.document_lengths.empty()) {
            batch.document_lengths.push_back(recipe_.data.sequence_length);
        }
        std::int64_t tokens = 0;
        for (const std::int64_t length : batch.document_lengths) {
            tokens += length;
        }
        at::manual_seed(static_cast<std::uint64_t>(recipe_.train.seed) + 1);
        batch.token_ids = at::randint(model_.config().vocab_size, {tokens}, at::kLong);
        batch.targets = at::randint(model_.config().vocab_size, {tokens}, at::kLong);
        return batch;
    }

    void step(const Parallel& parallel) {
        if (options_.level == "layer") {
            run_linear_mixers(parallel, 1);
        } else {
            (void)forward_backward(model_, {batch_}, parallel, mesh_);
        }
    }

    /// The first `count` (0: all) linear-attention mixers, one after another, with conversions.
    void run_linear_mixers(const Parallel& parallel, int count) {
        const BatchPlan plan = make_batch_plan(
            {.document_lengths = batch_.document_lengths,
             .parallel = parallel,
             .rank = parallel.cp > 1 ? mesh_.cp->rank() : 0,
             .conv_width = static_cast<int>(model_.config().linear_conv_kernel_dim)});
        const CpContext context{.group = mesh_.cp.get(), .plan = &plan, .parallel = parallel};
        const LayoutTag mixer_layout = plan.to_linear ? plan.linear->tag : plan.tag;
        for (std::int64_t layer = 0; layer < model_.config().num_layers(); ++layer) {
            if (model_.config().layer_types[static_cast<std::size_t>(layer)] !=
                LayerType::kLinearAttention) {
                continue;
            }
            const at::Tensor x = at::ones({plan.num_local_tokens(), model_.config().hidden_size},
                                          at::TensorOptions().dtype(model_.compute_dtype()))
                                     .requires_grad_(true);
            const Sharded mixed =
                model_.mixer(convert({x, plan.tag}, mixer_layout, context), layer, context);
            const at::Tensor y = convert(mixed, plan.tag, context).local;
            y.backward(at::ones_like(y));
            if (count > 0 && --count == 0) {
                return;
            }
        }
    }

    /// The step on one rank, for all variants; the other ranks wait.
    void make_reference() {
        on_rank_zero(mesh_, "the step on one rank", [&] {
            reference_loss_ =
                forward_backward(model_, {batch_}, one_rank(), one_rank_mesh("cpu")).loss;
            reference_ = gradients();
        });
    }

    void verify(const BenchVariant& variant) {
        const double loss = forward_backward(model_, {batch_}, variant.parallel, mesh_).loss;
        on_rank_zero(mesh_, "verify a step", [&] {
            double difference = 0.0, norm = 0.0, reference_norm = 0.0;  // squares
            const std::vector<at::Tensor> actual = gradients();
            for (std::size_t i = 0; i < actual.size(); ++i) {
                difference += (actual[i] - reference_[i]).square().sum().item<double>();
                norm += actual[i].square().sum().item<double>();
                reference_norm += reference_[i].square().sum().item<double>();
            }
            const bool is_bf16 = recipe_.model.dtype == "bf16";
            const Bars& bars = is_bf16 ? kBf16Bars : kFp32Bars;
            const double loss_error = std::abs(loss - reference_loss_) / std::abs(reference_loss_);
            const double norm_error = std::abs(std::sqrt(norm / reference_norm) - 1.0);
            const double gradient_error = std::sqrt(difference / reference_norm);
            if (!(loss_error <= bars.loss && norm_error <= bars.gradient_norm &&
                  (is_bf16 || gradient_error <= kFp32GradientBar))) {
                throw NumericsError(fmt::format(
                    "bench cp: {} on {} ranks is not the step of one rank: loss off by {:.1e} (bar "
                    "{:.1e}), gradient norm by {:.1e} (bar {:.1e}), gradient by {:.1e}",
                    variant.name, mesh_.cp->size(), loss_error, bars.loss, norm_error,
                    bars.gradient_norm, gradient_error));
            }
        });
    }

    [[nodiscard]] std::vector<at::Tensor> gradients() const {
        std::vector<at::Tensor> copies;
        for (const NamedParameter& parameter : model_.parameters()) {
            copies.push_back(parameter.value.grad().to(at::kDouble));
        }
        return copies;
    }

    template <typename Run>
    double milliseconds(const Run& run) {
        const Clock::time_point start = Clock::now();
        run();
        return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    }

    void measure(const Parallel& parallel, bool warm_up, Measured& into) {
        mesh_.world->barrier("bench");
        mesh_.reset_recorders();
        const TensorMemory memory;
        const double cpu_start = process_cpu_seconds();
        const double ms = milliseconds([&] { step(parallel); });
        const double cpu = process_cpu_seconds() - cpu_start;
        at::Tensor slowest = at::full({1}, ms, at::kDouble);
        mesh_.world->all_reduce_max("bench", slowest);
        if (warm_up) {
            return;
        }
        into.step_ms.push_back(slowest.item<double>());
        into.cpu_seconds += cpu;
        into.traffic = mesh_.traffic();
        into.conversion_seconds += mesh_.cp->recorder().of("conversion").cpu_seconds;
        into.peak_bytes = std::max(into.peak_bytes, memory.peak_bytes());
    }

    static double at_quantile(std::vector<double> values, double quantile) {
        std::sort(values.begin(), values.end());
        const auto last = static_cast<double>(values.size() - 1);
        return values[static_cast<std::size_t>(quantile * last + 0.5)];
    }

    /// Comm: sums CPU seconds over the ranks, takes the largest bytes.
    Json summary(const std::string& name, const Measured& measured) {
        std::int64_t bytes = 0, messages = 0;
        Json ops = Json::object();
        for (const auto& [op, traffic] : measured.traffic) {
            bytes += traffic.bytes;
            messages += traffic.messages;
            ops[op] = {{"messages", traffic.messages}, {"bytes", traffic.bytes}};
        }
        at::Tensor sums =
            at::tensor({measured.cpu_seconds, measured.conversion_seconds}, at::kDouble);
        mesh_.world->all_reduce_sum("bench", sums);
        const at::Tensor of_ranks = mesh_.world->all_gather(
            "bench", at::tensor({bytes, messages, measured.peak_bytes}, at::kLong));  // [P, 3]
        const at::Tensor most = of_ranks.amax(0);
        std::vector<double> peak_megabytes;
        for (std::int64_t rank = 0; rank < of_ranks.size(0); ++rank) {
            peak_megabytes.push_back(of_ranks[rank][2].item<double>() / 1e6);
        }
        const double cpu = sums[0].item<double>();
        Json result{{"name", name},
                    {"step_ms",
                     {{"median", at_quantile(measured.step_ms, 0.5)},
                      {"min", at_quantile(measured.step_ms, 0.0)},
                      {"p90", at_quantile(measured.step_ms, 0.9)}}},
                    {"cpu_seconds_per_step", cpu / options_.repeats},
                    {"megabytes_sent", most[0].item<double>() / 1e6},
                    {"messages", most[1].item<std::int64_t>()},
                    {"peak_megabytes", most[2].item<double>() / 1e6},
                    {"peak_megabytes_by_rank", peak_megabytes},
                    {"ops_of_rank_0", ops}};
        if (measured.conversion_seconds > 0.0) {
            result["conversion_share"] = sums[1].item<double>() / cpu;
        }
        return result;
    }

    const BenchCpOptions& options_;
    const Recipe& recipe_;
    const Mesh& mesh_;
    HybridModel model_;
    TokenBatch batch_;
    double reference_loss_ = 0.0;        // on rank 0
    std::vector<at::Tensor> reference_;  // gradients, on rank 0
};

}  // namespace

int bench_cp_worker(const BenchCpOptions& options) {
    const LaunchEnvironment environment = read_launch_environment();
    std::vector<std::string> overrides = options.overrides;
    overrides.push_back(fmt::format("train.accelerator.cp={}", environment.world_size));
    overrides.emplace_back("train.accelerator.dp=1");
    const Recipe recipe = load_recipe(options.recipe_path, overrides);
    const std::vector<BenchVariant> variants =
        bench_variants(options, recipe.train.accelerator,
                       recipe_model_config(recipe.model).head_counts(), recipe.model.dtype);
    Session session(environment, recipe.train.accelerator,
                    std::chrono::seconds(recipe.train.comm_timeout_seconds));
    Worker worker(options, recipe, session);
    const Json result = environment.world_size == 1 ? worker.run_alone() : worker.run(variants);
    return session.conclude([&] {
        write_file_atomically(options.worker_output, result.dump());
        return 0;
    });
}

}  // namespace hybridcp::cli
