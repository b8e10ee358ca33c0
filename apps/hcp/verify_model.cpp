#include "hcp/verify_model.h"

#include <ATen/ATen.h>

#include <cmath>
#include <filesystem>
#include <optional>
#include <set>

#include "hcp/compare.h"
#include "hcp/golden_case.h"
#include "hcp/model_run.h"
#include "hcp/report.h"
#include "hcp/session.h"
#include "hybridcp/error.h"
#include "train/model_setup.h"

namespace hybridcp::cli {

namespace {

// docs/numerics.md, section "models".
constexpr double kLossBar = 5e-6;       // absolute
constexpr double kTokenLossBar = 5e-5;  // absolute
constexpr double kHiddenBar = 3e-5;
constexpr double kGradientBar = 5e-4;
constexpr double kAllGradientsBar = 1e-4;
constexpr double kBf16Factor = 2.0;  // times Transformers' own bf16 error of hidden.norm

TokenBatch read_batch(const std::string& path) {
    const SafetensorsFile file(path);
    TokenBatch batch = batch_from_rows(file.read("input_ids"), file.read("targets"));
    if (file.contains("cu_seqlens")) {
        const auto offsets = to_integers(file.read("cu_seqlens"));
        if (offsets.empty() || offsets.back() != batch.token_ids.numel()) {
            throw FormatError(fmt::format("{}: cu_seqlens must end at the {} tokens of the row",
                                          path, batch.token_ids.numel()));
        }
        batch.document_lengths.clear();
        for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
            batch.document_lengths.push_back(offsets[i + 1] - offsets[i]);
        }
    }
    return batch;
}

/// The recorded numbers, under this library's parameter names and in the flat order of tokens.
class Expected {
  public:
    Expected(const std::string& path, const ModelConfig& config) : file_(path) {
        for (const auto& [stored, entry] : file_.entries()) {
            std::string name = stored;
            const std::string prefix = "grad.model.language_model.";
            if (name.rfind(prefix, 0) == 0) {
                name = "grad.model." + name.substr(prefix.size());
            }
            const bool is_loss = name == "ce_loss" && !config.has_experts();  // the only one then
            stored_names_[is_loss ? "loss" : name] = stored;
        }
        for (const char* needed : {"loss", "hidden.norm"}) {
            if (!has(needed)) {
                throw FormatError(fmt::format(
                    "{} has no tensor '{}': is it the expected file of the case?", path, needed));
            }
        }
    }
    [[nodiscard]] bool has(const std::string& name) const { return stored_names_.count(name) != 0; }
    [[nodiscard]] at::Tensor read_as(const std::string& name, const at::Tensor& like) const {
        return file_.read(stored_names_.at(name)).reshape(like.sizes());
    }
    /// Errors: FormatError naming a recorded tensor that the model does not give, or a gradient
    /// that is not recorded.
    void check_names(const ModelConfig& config) const {
        std::set<std::string> given = {"loss", "loss_per_token", "hidden.norm", "logits"};
        for (std::int64_t layer = 0; layer < config.num_layers(); ++layer) {
            given.insert(fmt::format("hidden.{}", layer));
            if (config.has_experts()) {
                given.insert({fmt::format("router_logits.{}", layer), "ce_loss", "aux_loss"});
            }
        }
        for (const ParameterShape& parameter : parameter_shapes(config)) {
            given.insert("grad." + parameter.name);
            if (!has("grad." + parameter.name)) {
                throw FormatError(
                    fmt::format("{}: has no 'grad.{}'", file_.path(), parameter.name));
            }
        }
        for (const auto& [name, stored] : stored_names_) {
            if (given.count(name) == 0) {
                throw FormatError(fmt::format("{}: the model gives no '{}'", file_.path(), stored));
            }
        }
    }

  private:
    SafetensorsFile file_;
    std::map<std::string, std::string> stored_names_;  // by this library's name
};

/// The folder of the case, which is that of its expected numbers.
std::filesystem::path case_folder(const VerifyModelOptions& options) {
    return std::filesystem::absolute(options.expected_path).parent_path();
}

/// Beside the model; for a copy of the model in another form, beside the case's folder.
std::string manifest_path(const VerifyModelOptions& options) {
    const std::filesystem::path beside_model =
        std::filesystem::path(options.model_folder) / "manifest.json";
    return std::filesystem::exists(beside_model)
               ? beside_model.string()
               : (case_folder(options).parent_path() / "manifest.json").string();
}

/// What the manifest says of the case; nothing without a manifest or an entry.
std::optional<double> manifest_number(const VerifyModelOptions& options, const std::string& key) {
    if (!std::filesystem::exists(manifest_path(options))) {
        return std::nullopt;
    }
    const nlohmann::json manifest = read_json(manifest_path(options));
    const nlohmann::json::json_pointer entry(
        fmt::format("/cases/{}/{}", case_folder(options).filename().string(), key));
    if (!manifest.contains(entry) || !manifest.at(entry).is_number()) {
        return std::nullopt;
    }
    return manifest.at(entry).get<double>();
}

double bf16_bar(const VerifyModelOptions& options) {
    const auto figure = manifest_number(options, "transformers_bfloat16/hidden_norm_rel_l2");
    if (!figure) {
        throw UsageError(fmt::format(
            "{} has no bfloat16 figure for case '{}', so there is no bar: verify it in fp32",
            manifest_path(options), case_folder(options).filename().string()));
    }
    return kBf16Factor * *figure;
}

/// The configuration of the folder, with the weight of the load-balancing loss that the case was
/// recorded with.
ModelConfig read_case_config(const VerifyModelOptions& options, const Recipe& recipe) {
    ModelConfig config = read_model_config(options.model_folder);
    std::optional<double> coefficient = options.router_aux_loss_coef;
    if (!coefficient) {
        coefficient = recipe.model.router_aux_loss_coef;
    }
    if (!coefficient && config.has_experts()) {
        coefficient = manifest_number(options, "router_aux_loss_coef");
    }
    return with_router_aux_loss_coef(std::move(config), coefficient);
}

std::vector<std::string> gradient_names(const ModelResults& results) {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : results) {
        if (name.rfind("grad.", 0) == 0) {
            names.push_back(name);
        }
    }
    return names;
}

/// loss, ce_loss, aux_loss.
bool is_scalar_loss(const std::string& name) {
    return name == "loss" || name == "ce_loss" || name == "aux_loss";
}

bool is_absolute(const std::string& name) {
    return is_scalar_loss(name) || name == "loss_per_token";
}

/// Errors of one run's results, by the names of the table's rows.
std::map<std::string, Difference> differences(const ModelResults& results,
                                              const Expected& expected) {
    std::map<std::string, Difference> all;
    for (const auto& [name, tensor] : results) {
        if (!expected.has(name)) {
            continue;
        }
        const at::Tensor reference = expected.read_as(name, tensor);
        all[name] = is_absolute(name) ? max_abs(tensor, reference) : relative_l2(tensor, reference);
    }
    double error = 0.0;
    double norm = 0.0;
    for (const std::string& name : gradient_names(results)) {
        const at::Tensor reference = expected.read_as(name, results.at(name)).to(at::kDouble);
        const at::Tensor actual = results.at(name).to(at::kCPU, at::kDouble);
        error += (actual - reference).square().sum().item<double>();
        norm += reference.square().sum().item<double>();
    }
    all["all gradients"] = {std::sqrt(error / norm)};
    return all;
}

double fp32_bar(const std::string& name) {
    if (is_scalar_loss(name)) {
        return kLossBar;
    }
    if (name == "loss_per_token") {
        return kTokenLossBar;
    }
    if (name == "all gradients") {
        return kAllGradientsBar;
    }
    return name.rfind("grad.", 0) == 0 ? kGradientBar : kHiddenBar;
}

struct RunPair {
    ModelResults all_ranks;
    std::optional<ModelResults> one_rank;
};

void fill_report(const RunPair& runs,
                 const Expected& expected,
                 std::optional<double> bf16,
                 Report& report) {
    const auto errors = differences(runs.all_ranks, expected);
    std::map<std::string, Difference> one_rank;
    if (runs.one_rank) {
        one_rank = differences(*runs.one_rank, expected);
    }
    for (const auto& [name, difference] : errors) {
        if (bf16 && name != "hidden.norm") {
            continue;
        }
        report.add({.tensor = name,
                    .measure = is_absolute(name) ? "abs" : "rel-L2",
                    .error = difference.error,
                    .bar = bf16 ? *bf16 : fp32_bar(name),
                    .where = difference.where == "[]" ? "" : difference.where,
                    .one_rank_error = runs.one_rank ? std::optional<double>(one_rank.at(name).error)
                                                    : std::nullopt});
    }
    if (bf16) {
        report.add_note(
            fmt::format("without a bar in bf16: loss off by {:.1e}, all gradients by {:.1e}",
                        errors.at("loss").error, errors.at("all gradients").error));
    }
}

}  // namespace

int verify_model(const VerifyModelOptions& options) {
    const LaunchEnvironment environment = read_launch_environment();
    const Recipe recipe = recipe_from_overrides({.command = "hcp verify model",
                                                 .base = "model: {dtype: fp32}",
                                                 .dtype = options.dtype,
                                                 .overrides = options.overrides,
                                                 .num_ranks = environment.world_size});
    const ParallelOptions& accelerator = recipe.train.accelerator;
    if (accelerator.dp != 1) {
        throw UsageError(
            "verify model splits one batch over cp ranks: leave train.accelerator.dp at 1");
    }
    if (accelerator.fsdp) {
        throw UsageError(
            "verify model keeps parameters whole: leave train.accelerator.fsdp out (verify "
            "trajectory and verify parallel run sharded)");
    }
    select_device(accelerator.device, environment);
    const ModelConfig config = read_case_config(options, recipe);
    const Parallel parallel = make_parallel(accelerator, config.head_counts(), recipe.model.dtype);
    const bool is_bf16 = recipe.model.dtype == "bf16";
    const auto bar = is_bf16 ? std::optional<double>(bf16_bar(options)) : std::nullopt;
    const TokenBatch batch = read_batch(options.batch_path);
    const Expected expected(options.expected_path, config);
    expected.check_names(config);
    std::string skipped;
    HybridModel model(config,
                      load_parameters(options.model_folder, config, accelerator.device, &skipped),
                      compute_dtype(recipe));
    model.gdn_chunk_size = recipe.train.gdn_chunk_size;
    model.activation_checkpoint = activation_checkpoint_of(recipe.train.activation_checkpoint);

    Session session(environment, accelerator,
                    std::chrono::seconds(recipe.train.comm_timeout_seconds));
    RunPair runs{.all_ranks = run_model(model, batch, parallel, session.mesh()),
                 .one_rank = std::nullopt};
    return session.conclude([&] {
        if (options.against_one_rank) {
            Parallel alone = parallel;
            alone.cp = 1;
            runs.one_rank = run_model(model, batch, alone, one_rank_mesh(accelerator.device));
        }
        Report report(fmt::format("{}: {}", options.model_folder, describe_run(recipe)));
        if (!skipped.empty()) {
            report.add_note(skipped);
        }
        if (config.has_experts()) {
            report.add_note(
                fmt::format("loss = ce_loss + {} aux_loss", config.router_aux_loss_coef));
        }
        fill_report(runs, expected, bar, report);
        return finish_reports({report}, options.report_path);
    });
}

}  // namespace hybridcp::cli
