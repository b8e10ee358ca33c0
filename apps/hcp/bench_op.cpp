#include "hcp/bench_op.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/files.h"
#include "hcp/bench_measure.h"
#include "hcp/compare.h"
#include "hcp/report.h"
#include "hybridcp/error.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/simd/isa.h"
#include "train/tensor_memory.h"

namespace hybridcp::cli {

namespace {

using Json = nlohmann::json;

/// A way to run the operators: while what `enter` returns lives, this thread's calls go that way.
struct OpBackend {
    const char* name;
    bool has_isas;  // kernels compiled per instruction set
    std::shared_ptr<void> (*enter)();
};

std::shared_ptr<void> as_eager() {
    return std::make_shared<ForcedPointwise>(PointwiseBackend::kEager);
}

std::shared_ptr<void> as_fused() {
    return std::make_shared<ForcedPointwise>(PointwiseBackend::kFused);
}

constexpr std::array kBackends{
    OpBackend{"eager", false, as_eager},
    OpBackend{"fused", true, as_fused},
};

struct OpVariant {
    std::string name;
    const OpBackend* backend = nullptr;
    std::optional<Isa> isa = std::nullopt;
};

/// Forces a variant while it lives.
class Entered {
  public:
    explicit Entered(const OpVariant& variant) : backend_(variant.backend->enter()) {
        if (variant.isa) {
            forced_.emplace(*variant.isa);
        }
    }

  private:
    std::shared_ptr<void> backend_;
    std::optional<ForcedIsa> forced_;
};

std::vector<OpVariant> op_variants(const BenchOpOptions& options) {
    std::vector<std::string> known;
    for (const OpBackend& backend : kBackends) {
        known.emplace_back(backend.name);
    }
    for (const std::string& name : options.backends) {
        check_word(fmt::format("bench {} --backend", options.op), name, known);
    }
    const std::vector<Isa> isas =
        parse_bench_isas(fmt::format("bench {} --isa", options.op), options.isas);
    std::vector<OpVariant> variants;
    for (const OpBackend& backend : kBackends) {
        const auto& names = options.backends;
        if (!names.empty() && std::find(names.begin(), names.end(), backend.name) == names.end()) {
            continue;
        }
        if (!backend.has_isas) {
            variants.push_back({backend.name, &backend});
            continue;
        }
        for (const Isa isa : isas) {
            variants.push_back({fmt::format("{} {}", backend.name, isa_name(isa)), &backend, isa});
        }
    }
    return variants;
}

Tensors leaves(const Tensors& inputs, std::optional<at::ScalarType> dtype) {
    Tensors result;
    for (const at::Tensor& input : inputs) {
        result.push_back((dtype ? input.to(*dtype) : input).detach().requires_grad_(true));
    }
    return result;
}

/// The output and the gradient of every input, for the upstream gradient `d_y`.
Tensors run_all(const std::function<at::Tensor(const Tensors&)>& op,
                const Tensors& inputs,
                const at::Tensor& d_y) {
    const at::Tensor y = op(inputs);
    Tensors results = torch::autograd::grad({y}, inputs, {d_y.to(y.scalar_type())});
    results.insert(results.begin(), y.detach());
    return results;
}

at::Tensor upstream_gradient(const OpProblem& problem) {
    const c10::NoGradGuard no_grad;
    const at::Tensor y = problem.kernel(problem.inputs);
    return y.dim() == 0 ? at::ones_like(y) : at::randn_like(y);
}

/// docs/numerics.md, tolerances.
double bar_of(bool is_output, at::ScalarType dtype) {
    return dtype == at::kBFloat16 ? 5e-3 : is_output ? 2e-6 : 5e-6;
}

Report verify(const BenchOpOptions& options, const OpVariant& variant, const std::string& dtype) {
    constexpr std::int64_t kTokens = 301;
    const at::ScalarType type = parse_bench_dtype("bench " + options.op, dtype);
    const OpProblem problem = make_op_problem(options.op, kTokens, options.width, type);
    const at::Tensor d_y = upstream_gradient(problem);
    const Tensors expected =
        run_all(problem.formula, leaves(problem.inputs, at::kDouble), d_y.to(at::kDouble));
    const Entered entered(variant);
    const Tensors actual = run_all(problem.kernel, leaves(problem.inputs, std::nullopt), d_y);
    Report report(fmt::format("{} {}, {} tokens, {}", options.op, variant.name, kTokens, dtype));
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const Difference difference = relative_l2(actual[i], expected[i]);
        report.add({.tensor = i == 0 ? "output" : "d" + problem.names[i - 1],
                    .measure = "rel-L2",
                    .error = difference.error,
                    .bar = bar_of(i == 0, type)});
    }
    return report;
}

struct PassSamples {
    std::vector<double> us, products_us;
    double peak_bytes = 0.0;
    double moved_bytes = 0.0;
};

struct OpSamples {
    PassSamples forward, backward;
};

void time_once(const OpProblem& problem,
               const Tensors& inputs,
               const at::Tensor& d_y,
               OpSamples& into) {
    {
        const TensorMemory memory;
        Stopwatch watch(max_threads());
        const at::Tensor y = problem.kernel(inputs);
        into.forward.us.push_back(watch.lap_us());
        into.forward.peak_bytes = static_cast<double>(memory.peak_bytes());
        Stopwatch backward_watch(max_threads());
        const Tensors gradients = torch::autograd::grad({y}, inputs, {d_y});
        into.backward.us.push_back(backward_watch.lap_us());
        into.backward.peak_bytes = static_cast<double>(memory.peak_bytes());
    }
    const c10::NoGradGuard no_grad;
    for (const auto& [products, pass] : {std::pair{&problem.forward_products, &into.forward},
                                         std::pair{&problem.backward_products, &into.backward}}) {
        Stopwatch watch(max_threads());
        if (*products) {
            (*products)();
            pass->products_us.push_back(watch.lap_us());
        }
    }
}

Json pass_summary(const PassSamples& pass, double copy_bandwidth) {
    const double us = median(pass.us);
    const double products = pass.products_us.empty() ? 0.0 : median(pass.products_us);
    const double rate = pass.moved_bytes / ((us - products) * 1e-6);
    return {{"us", us},
            {"us_min", smallest(pass.us)},
            {"products_us", products},
            {"megabytes_moved", pass.moved_bytes / 1e6},
            {"gigabytes_per_second", rate * 1e-9},
            {"of_copy", rate / copy_bandwidth},
            {"peak_megabytes", pass.peak_bytes / 1e6}};
}

Json run_dtype(const BenchOpOptions& options,
               const std::vector<OpVariant>& variants,
               const std::string& dtype) {
    const OpProblem problem = make_op_problem(options.op, options.tokens, options.width,
                                              parse_bench_dtype("bench " + options.op, dtype));
    const at::Tensor d_y = upstream_gradient(problem);
    const Tensors inputs = leaves(problem.inputs, std::nullopt);
    std::vector<OpSamples> samples(variants.size());
    std::vector<double> bandwidths;
    for (int turn = -1; turn < options.repeats; ++turn) {
        for (std::size_t i = 0; i < variants.size(); ++i) {
            const Entered entered(variants[i]);
            OpSamples warm_up;
            time_once(problem, inputs, d_y, turn < 0 ? warm_up : samples[i]);
        }
        bandwidths.push_back(measure_copy_bandwidth());
    }
    const double bandwidth = median(bandwidths);
    Json run{{"dtype", dtype},
             {"copy_gigabytes_per_second", bandwidth * 1e-9},
             {"variants", Json::array()}};
    for (std::size_t i = 0; i < variants.size(); ++i) {
        samples[i].forward.moved_bytes = problem.forward_bytes;
        samples[i].backward.moved_bytes = problem.backward_bytes;
        run["variants"].push_back({{"name", variants[i].name},
                                   {"forward", pass_summary(samples[i].forward, bandwidth)},
                                   {"backward", pass_summary(samples[i].backward, bandwidth)}});
    }
    return run;
}

std::string table(const Json& results) {
    std::string text =
        fmt::format("{}, {} thread(s); {}, {} tokens\n", results.at("cpu").get<std::string>(),
                    results.at("threads").get<int>(), results.at("op").get<std::string>(),
                    results.at("tokens").get<std::int64_t>());
    text += fmt::format("{:<5} {:<9} {:<18} {:>10} {:>10} {:>11} {:>9} {:>8} {:>8} {:>9} {:>9}\n",
                        "dtype", "pass", "variant", "median us", "min", "products us", "MB moved",
                        "GB/s", "of copy", "peak MB", "vs eager");
    for (const Json& run : results.at("runs")) {
        for (const char* pass : {"forward", "backward"}) {
            double eager_us = std::nan("");
            for (const Json& variant : run.at("variants")) {
                const Json& entry = variant.at(pass);
                const double us = entry.at("us").get<double>();
                const bool is_eager = variant.at("name") == "eager";
                eager_us = is_eager ? us : eager_us;
                text += fmt::format(
                    "{:<5} {:<9} {:<18} {:>10.1f} {:>10.1f} {:>11.1f} {:>9.1f} {:>8.2f} {:>6.1f} % "
                    "{:>9.1f} {:>9}\n",
                    run.at("dtype").get<std::string>(), pass, variant.at("name").get<std::string>(),
                    us, entry.at("us_min").get<double>(), entry.at("products_us").get<double>(),
                    entry.at("megabytes_moved").get<double>(),
                    entry.at("gigabytes_per_second").get<double>(),
                    100 * entry.at("of_copy").get<double>(),
                    entry.at("peak_megabytes").get<double>(),
                    is_eager || std::isnan(eager_us) ? "-" : fmt::format("{:.2f}x", eager_us / us));
            }
        }
        text += fmt::format("{:<5} copy of memory: {:.2f} GB/s read and written\n",
                            run.at("dtype").get<std::string>(),
                            run.at("copy_gigabytes_per_second").get<double>());
    }
    return text;
}

}  // namespace

int bench_op(const BenchOpOptions& options) {
    const std::vector<OpVariant> variants = op_variants(options);
    at::set_num_threads(options.threads);
    std::vector<Report> reports;
    for (const std::string& dtype : options.dtypes) {
        for (const OpVariant& variant : variants) {
            reports.push_back(verify(options, variant, dtype));
        }
    }
    if (!print_verdict(reports)) {
        return 1;
    }
    Json results{{"cpu", cpu_name()},          {"version", HCP_VERSION},
                 {"op", options.op},           {"tokens", options.tokens},
                 {"threads", options.threads}, {"repeats", options.repeats}};
    for (const Report& report : reports) {
        results["verified"].push_back(report.to_json());
    }
    for (const std::string& dtype : options.dtypes) {
        results["runs"].push_back(run_dtype(options, variants, dtype));
    }
    fmt::print("{}", table(results));
    if (!options.report_path.empty()) {
        write_file_atomically(options.report_path, results.dump(2) + "\n");
    }
    return 0;
}

}  // namespace hybridcp::cli
