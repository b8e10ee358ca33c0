#include "hcp/verify_op.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <torch/csrc/autograd/autograd.h>
#include <filesystem>

#include "hcp/compare.h"
#include "hcp/op_formulas.h"
#include "hybridcp/error.h"
#include "kernels/pointwise/pointwise.h"

namespace hybridcp::cli {

namespace {

// docs/numerics.md, section "operators".
constexpr double kOutputBar = 2e-6;
constexpr double kGradientBar = 5e-6;
constexpr double kAuxGradientBar = 1e-5;  // of router logits by way of the load-balancing loss
constexpr double kBf16Bar = 5e-3;
constexpr double kBf16StepBar = 1.0;

OpRun check_run(const VerifyOpOptions& options) {
    OpRun run{.chunk_size = options.chunk_size};
    if (options.chunk_size < 1) {
        throw UsageError(
            fmt::format("--chunk {} is not a chunk size: 64 is the default", options.chunk_size));
    }
    if (options.backend != "eager" && options.backend != "fused" &&
        options.backend != "reference") {
        throw UsageError(fmt::format("unknown backend '{}': eager, fused and reference are built",
                                     options.backend));
    }
    if (options.dtype != "fp32" && options.dtype != "bf16") {
        throw UsageError(
            fmt::format("unknown dtype '{}': fp32 and bf16 are supported", options.dtype));
    }
    run.reference = options.backend == "reference";
    run.fused = options.backend == "fused";
    run.bf16 = options.dtype == "bf16";
    if (run.reference && run.bf16) {
        throw UsageError(
            "the reference computes in fp64: leave --dtype bf16 out, or say --backend eager");
    }
    run.dtype = run.reference ? at::kDouble : run.bf16 ? at::kBFloat16 : at::kFloat;
    if (options.device != "cpu" && options.device != "cuda") {
        throw UsageError(
            fmt::format("unknown device '{}': cpu and cuda are known", options.device));
    }
    if (options.device == "cuda") {
        if (!at::hasCUDA()) {
            throw UsageError(
                "--device cuda: this build or this machine has no CUDA; --device cpu works");
        }
        run.device = at::kCUDA;
    }
    return run;
}

at::Tensor in_run(const at::Tensor& tensor, const OpRun& run) {
    return tensor.is_floating_point() ? tensor.to(run.device, run.dtype) : tensor.to(run.device);
}

struct Results {
    NamedTensors outputs;
    NamedTensors gradients;  // by the input's name
};

/// The differentiable inputs of a case.
std::vector<std::string> input_names(const OpFormula& formula, const OpCase& op_case) {
    std::vector<std::string> names;
    for (const std::string& name : formula.inputs) {
        if (op_case.has(name)) {
            names.push_back(name);
        }
    }
    const auto indexed = [&](int index) {
        return fmt::format("{}.{}", formula.indexed_inputs, index);
    };
    for (int i = 0; !formula.indexed_inputs.empty() && op_case.has(indexed(i)); ++i) {
        names.push_back(indexed(i));
    }
    return names;
}

// L = sum over outputs of <output, upstream gradient>, for the outputs that have one.
Results run_formula(const OpFormula& formula, const OpCase& op_case, const OpRun& run) {
    NamedTensors inputs;
    for (const std::string& name : input_names(formula, op_case)) {
        inputs[name] = in_run(op_case.read(name), run).requires_grad_(true);
    }
    Results results{.outputs = formula.run(inputs, op_case), .gradients = {}};
    std::vector<at::Tensor> roots;
    std::vector<at::Tensor> upstream;
    for (const auto& [name, output] : results.outputs) {
        if (op_case.has("d" + name) && output.requires_grad()) {
            roots.push_back(output);
            upstream.push_back(in_run(op_case.read("d" + name), run).to(output.scalar_type()));
        }
    }
    std::vector<at::Tensor> leaves;
    for (const auto& [name, input] : inputs) {
        leaves.push_back(input);
    }
    const auto gradients = torch::autograd::grad(roots, leaves, upstream);
    std::size_t next = 0;
    for (const auto& [name, input] : inputs) {
        results.gradients["d" + name] = gradients[next++];
    }
    return results;
}

std::vector<std::string> known_names(const OpFormula& formula, const OpCase& op_case) {
    std::vector<std::string> names = formula.others;
    for (const auto& list : {input_names(formula, op_case), formula.outputs}) {
        for (const std::string& name : list) {
            names.push_back(name);
            names.push_back("d" + name);
        }
    }
    return names;
}

void add_comparison(const std::string& name,
                    const at::Tensor& actual,
                    const at::Tensor& expected,
                    std::int64_t head_dim,
                    double bar,
                    Report& report) {
    const bool per_head = head_dim >= 0 && expected.dim() > head_dim + 1;
    const Difference difference = per_head ? relative_l2_per_head(actual, expected, head_dim, bar)
                                           : relative_l2(actual, expected);
    report.add({.tensor = name,
                .measure = "rel-L2",
                .error = difference.error,
                .bar = bar,
                .where = difference.where});
}

void compare_formula(const OpFormula& formula,
                     const OpCase& op_case,
                     const OpRun& run,
                     Report& report) {
    op_case.check_names(known_names(formula, op_case));
    const Results results = run_formula(formula, op_case, run);
    const std::int64_t head_dim = run.bf16 ? formula.head_dim : -1;
    const double output_bar = run.reference ? kReferenceBar : run.bf16 ? kBf16Bar : kOutputBar;
    const double fp32_gradient_bar = op_case.has("aux") ? kAuxGradientBar : kGradientBar;
    const double gradient_bar = run.reference ? kReferenceBar
                                : run.bf16    ? kBf16Bar
                                              : fp32_gradient_bar;
    for (const std::string& name : formula.outputs) {
        if (op_case.has(name)) {
            add_comparison(name, results.outputs.at(name), op_case.read(name), head_dim, output_bar,
                           report);
        }
    }
    if (run.bf16 && op_case.has("y_bf16")) {
        const Difference steps = bf16_steps(results.outputs.at("y"), op_case.read("y_bf16"));
        report.add({.tensor = "y_bf16",
                    .measure = "bf16 steps",
                    .error = steps.error,
                    .bar = kBf16StepBar,
                    .where = steps.where});
    }
    for (const auto& [name, gradient] : results.gradients) {
        add_comparison(name, gradient, op_case.read(name), head_dim, gradient_bar, report);
    }
}

std::vector<std::string> known_operators() {
    std::vector<std::string> names = {"gdn"};
    for (const auto& [name, formula] : op_formulas()) {
        names.push_back(name);
    }
    return names;
}

}  // namespace

int verify_op(const VerifyOpOptions& options) {
    const OpRun run = check_run(options);
    const auto formula = op_formulas().find(options.op);
    if (options.op != "gdn" && formula == op_formulas().end()) {
        throw UsageError(fmt::format("unknown operator '{}': did you mean {}? (known: {})",
                                     options.op, nearest_word(options.op, known_operators()),
                                     fmt::join(known_operators(), ", ")));
    }
    if (run.bf16 && options.op != "gdn" && !formula->second.has_bf16_bar) {
        throw UsageError(
            fmt::format("verify op {} has no bf16 tolerance: say --dtype fp32", options.op));
    }
    const ForcedPointwise pointwise(run.fused ? PointwiseBackend::kFused
                                              : PointwiseBackend::kEager);
    std::vector<Report> reports;
    for (const std::string& file : options.files) {
        const OpCase op_case(options.op, file);
        Report report(fmt::format("{} {}: {}{} on {}", options.op,
                                  std::filesystem::path(file).filename().string(), options.backend,
                                  run.reference ? " (fp64)" : " " + options.dtype, options.device));
        if (options.op == "gdn") {
            compare_gdn(op_case, run, report);
        } else {
            compare_formula(formula->second, op_case, run, report);
        }
        reports.push_back(std::move(report));
    }
    return finish_reports(reports, options.report_path);
}

}  // namespace hybridcp::cli
