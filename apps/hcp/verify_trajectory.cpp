#include "hcp/verify_trajectory.h"

#include <ATen/ATen.h>

#include <cmath>
#include <filesystem>

#include "hcp/golden_case.h"
#include "hcp/report.h"
#include "hcp/session.h"
#include "hybridcp/error.h"
#include "train/model_setup.h"
#include "train/trained_model.h"

namespace hybridcp::cli {

namespace {

// docs/numerics.md, section "trajectories".
constexpr double kLossBar = 2e-5;          // absolute
constexpr double kGradientNormBar = 1e-3;  // relative
constexpr double kRateBar = 1e-6;          // relative; the trace is fp32
constexpr double kAllParametersBar = 1e-3;
constexpr double kOneParameterBar = 1e-2;

std::string file_in(const std::string& folder, const std::string& name) {
    return (std::filesystem::path(folder) / name).string();
}

/// The recorded run: what it read, how it was optimised.
struct Recording {
    std::int64_t rows = 0;
    std::int64_t row_length = 0;
    std::int64_t steps = 0;
    AdamWOptions optimizer;
    ScheduleOptions schedule;
    double grad_clip = 0.0;
    double router_aux_loss_coef = 0.0;  // 0 of a dense model
    at::Tensor tokens;                  // [steps rows row_length + 1]
};

Recording read_recording(const std::string& folder) {
    const std::string path = file_in(folder, "manifest.json");
    const nlohmann::json manifest = read_json(path);
    Recording recording;
    try {
        recording.rows = manifest.at("batch").get<std::int64_t>();
        recording.row_length = manifest.at("seq_len").get<std::int64_t>();
        recording.steps = manifest.at("steps").get<std::int64_t>();
        recording.router_aux_loss_coef = manifest.at("router_aux_loss_coef").get<double>();
        const nlohmann::json& optimizer = manifest.at("optimizer");
        recording.optimizer = {.betas = {optimizer.at("betas").at(0).get<double>(),
                                         optimizer.at("betas").at(1).get<double>()},
                               .eps = optimizer.at("eps").get<double>(),
                               .weight_decay = optimizer.at("weight_decay").get<double>()};
        recording.grad_clip = optimizer.at("grad_clip").get<double>();
        const nlohmann::json& schedule = manifest.at("schedule");
        recording.schedule = {.learning_rate = schedule.at("lr").get<double>(),
                              .steps = recording.steps,
                              .warmup_steps = schedule.at("warmup_steps").get<std::int64_t>(),
                              .decay = "cosine",
                              .min_lr_ratio = schedule.at("min_ratio").get<double>()};
    } catch (const nlohmann::json::exception& error) {
        throw FormatError(fmt::format("{}: {}", path, error.what()));
    }
    const std::string tokens_path = file_in(folder, "tokens.safetensors");
    recording.tokens = SafetensorsFile(tokens_path).read("tokens").to(at::kLong);
    const std::int64_t needed = recording.steps * recording.rows * recording.row_length + 1;
    if (recording.tokens.numel() != needed) {
        throw FormatError(fmt::format("{}: holds {} tokens, the manifest asks for {}", tokens_path,
                                      recording.tokens.numel(), needed));
    }
    return recording;
}

/// The model that the run starts from, with the run's weight of the load-balancing loss.
ModelConfig read_run_config(const VerifyTrajectoryOptions& options, const Recording& recording) {
    ModelConfig config = read_model_config(options.model_folder);
    if (!config.has_experts() && recording.router_aux_loss_coef != 0.0) {
        throw UsageError(
            fmt::format("{} is a run of a model with experts, {} has none: give the "
                        "model that the run starts from",
                        options.folder, options.model_folder));
    }
    config.router_aux_loss_coef = recording.router_aux_loss_coef;
    return config;
}

/// The rows of step `step` that this dp rank takes, as one micro-batch.
std::vector<TokenBatch> batches_of_step(const Recording& recording,
                                        std::int64_t step,
                                        const Group& dp) {
    const std::int64_t size = recording.rows * recording.row_length;
    const std::int64_t rows = recording.rows / dp.size();
    const auto own_rows = [&](std::int64_t shift) {
        return recording.tokens.narrow(0, step * size + shift, size)
            .view({recording.rows, recording.row_length})
            .narrow(0, dp.rank() * rows, rows);
    };
    return {batch_from_rows(own_rows(0), own_rows(1))};
}

using Parameters = std::map<std::string, at::Tensor>;  // fp64

/// Comm: sharded parameters are gathered, on every rank.
Parameters copy_parameters(TrainedModel& trained) {
    Parameters copies;
    trained.for_each_parameter([&](const NamedParameter& parameter) {
        copies[parameter.name] =
            parameter.value.detach().to(at::kCPU, at::kDouble, false, /*copy=*/true);
    });
    return copies;
}

struct Trace {
    std::vector<double> loss, ce_loss, grad_norm, lr;
    std::vector<double> aux_loss = {};  // of a model with experts
};

Trace train(const Recording& recording,
            TrainedModel& trained,
            const Parallel& parallel,
            const Mesh& mesh) {
    Trace trace;
    for (std::int64_t step = 0; step < recording.steps; ++step) {
        mesh.set_step(step);
        const auto batches = batches_of_step(recording, step, *mesh.dp);
        const StepLoss loss = trained.forward_backward(batches, parallel);
        trace.loss.push_back(loss.loss);
        trace.ce_loss.push_back(loss.ce_loss);
        if (loss.aux_loss) {
            trace.aux_loss.push_back(*loss.aux_loss);
        }
        trace.lr.push_back(learning_rate_at(recording.schedule, step));
        trace.grad_norm.push_back(trained.update(trace.lr.back(), recording.grad_clip));
    }
    return trace;
}

void add_curve(const std::string& name,
               const std::vector<double>& actual,
               const at::Tensor& expected,
               double bar,
               bool relative,
               Report& report) {
    const at::Tensor reference = expected.to(at::kDouble);
    double worst = 0.0;
    std::size_t worst_step = 0;
    for (std::size_t step = 0; step < actual.size(); ++step) {
        const double value = reference[static_cast<std::int64_t>(step)].item<double>();
        const double error = std::abs(actual[step] - value) / (relative ? std::abs(value) : 1.0);
        if (!(error <= worst)) {
            worst = error;
            worst_step = step;
        }
    }
    report.add({.tensor = name,
                .measure = relative ? "relative" : "abs",
                .error = worst,
                .bar = bar,
                .where = fmt::format("step {}", worst_step)});
}

void add_losses(const Trace& trace, const SafetensorsFile& file, Report& report) {
    add_curve("loss", trace.loss, file.read("loss"), kLossBar, false, report);
    if (!trace.aux_loss.empty()) {
        add_curve("ce_loss", trace.ce_loss, file.read("ce_loss"), kLossBar, false, report);
        add_curve("aux_loss", trace.aux_loss, file.read("aux_loss"), kLossBar, false, report);
    }
}

/// |final - expected| / |expected - start|, of all parameters and of each.
void add_final(const Parameters& start,
               const Parameters& final,
               const SafetensorsFile& recorded,
               Report& report) {
    double all_error = 0.0;
    double all_movement = 0.0;
    double worst = 0.0;
    std::string worst_name;
    for (const auto& [name, value] : final) {
        const at::Tensor expected = recorded.read(name).to(at::kDouble);
        const double error = (value - expected).square().sum().item<double>();
        const double movement = (start.at(name) - expected).square().sum().item<double>();
        all_error += error;
        all_movement += movement;
        const double ratio = std::sqrt(error / movement);
        if (!(ratio <= worst)) {
            worst = ratio;
            worst_name = name;
        }
    }
    report.add({.tensor = "final parameters, all",
                .measure = "moved",
                .error = std::sqrt(all_error / all_movement),
                .bar = kAllParametersBar});
    report.add({.tensor = "final parameters, each",
                .measure = "moved",
                .error = worst,
                .bar = kOneParameterBar,
                .where = worst_name});
}

}  // namespace

int verify_trajectory(const VerifyTrajectoryOptions& options) {
    const LaunchEnvironment environment = read_launch_environment();
    const Recording recording = read_recording(options.folder);
    const std::string base =
        fmt::format("model: {{dtype: fp32}}\ntrain: {{global_batch_size: {}, micro_batch_size: 1}}",
                    recording.rows);
    const Recipe recipe = recipe_from_overrides({.command = "hcp verify trajectory",
                                                 .base = base,
                                                 .dtype = "",
                                                 .overrides = options.overrides,
                                                 .num_ranks = environment.world_size});
    if (recipe.model.dtype != "fp32") {
        throw UsageError("verify trajectory has bars for fp32 only: leave model.dtype out");
    }
    const ParallelOptions& accelerator = recipe.train.accelerator;
    select_device(accelerator.device, environment);
    const ModelConfig config = read_run_config(options, recording);
    const Parallel parallel = make_parallel(accelerator, config.head_counts(), recipe.model.dtype);
    const SafetensorsFile trace_file(file_in(options.folder, "trace.safetensors"));
    const SafetensorsFile final_file(file_in(options.folder, "final.safetensors"));
    const auto source = stored_parameters(options.model_folder, config);

    Session session(environment, accelerator,
                    std::chrono::seconds(recipe.train.comm_timeout_seconds));
    TrainedModel trained(
        {.config = config,
         .gdn_chunk_size = recipe.train.gdn_chunk_size,
         .activation_checkpoint = activation_checkpoint_of(recipe.train.activation_checkpoint),
         .optimizer = recording.optimizer,
         .sharded = parallel.fsdp,
         .prefetch = parallel.fsdp_prefetch},
        *source, session.mesh());
    const Parameters start = copy_parameters(trained);
    const Trace trace = train(recording, trained, parallel, session.mesh());
    const Parameters final = copy_parameters(trained);
    return session.conclude([&] {
        Report report(
            fmt::format("{}, {} steps: {}", options.folder, recording.steps, describe_run(recipe)));
        add_losses(trace, trace_file, report);
        add_curve("grad_norm", trace.grad_norm, trace_file.read("grad_norm"), kGradientNormBar,
                  true, report);
        add_curve("lr", trace.lr, trace_file.read("lr"), kRateBar, true, report);
        add_final(start, final, final_file, report);
        report.add_note(fmt::format("loss {:.4f} at the first step, {:.4f} at the last",
                                    trace.loss.front(), trace.loss.back()));
        return finish_reports({report}, options.report_path);
    });
}

}  // namespace hybridcp::cli
