#include "hcp/bench_cp.h"

#include <fmt/ranges.h>
#include <stdlib.h>
#include <sys/utsname.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "comm/launch_environment.h"
#include "core/files.h"
#include "hcp/bench_measure.h"
#include "hcp/launcher.h"
#include "hybridcp/error.h"
#include "train/model_setup.h"
#include "train/recipe.h"

namespace hybridcp::cli {

namespace {

using Json = nlohmann::json;

/// What a variant's name stands for, as words of a recipe.
struct VariantWords {
    const char* name;
    const char* linear_mode;
    const char* stream;
    const char* linear_layout;
    const char* convert_to;
    bool elide = true;
};

constexpr std::array kVariants{
    VariantWords{"gather_hidden", "gather_hidden", "zigzag", "native", "folded"},
    VariantWords{"convert", "p2p", "zigzag", "convert", "folded"},
    VariantWords{"convert-each-layer", "p2p", "zigzag", "convert", "folded", false},
    VariantWords{"convert-contiguous", "p2p", "zigzag", "convert", "contiguous"},
    VariantWords{"native-p2p", "p2p", "zigzag", "native", "folded"},
    VariantWords{"native-all_gather", "all_gather", "zigzag", "native", "folded"},
    VariantWords{"native-scan", "scan", "zigzag", "native", "folded"},
    VariantWords{"native-ulysses", "ulysses", "zigzag", "native", "folded"},
    VariantWords{"folded-p2p", "p2p", "folded", "native", "folded"},
    VariantWords{"contiguous-p2p", "p2p", "contiguous", "native", "folded"},
};

std::vector<std::string> worker_arguments(const BenchCpOptions& options,
                                          const std::string& output) {
    std::vector<std::string> arguments{"hcp", "bench", "cp", options.recipe_path};
    arguments.insert(arguments.end(), options.overrides.begin(), options.overrides.end());
    const auto add = [&](const char* flag, const std::string& value) {
        arguments.emplace_back(flag);
        arguments.push_back(value);
    };
    add("--level", options.level);
    add("--warm-up", std::to_string(options.warm_up));
    add("--repeats", std::to_string(options.repeats));
    add("--worker-output", output);
    if (!options.variants.empty()) {
        add("--variants", fmt::format("{}", fmt::join(options.variants, ",")));
    }
    if (!options.documents.empty()) {
        add("--documents", fmt::format("{}", fmt::join(options.documents, ",")));
    }
    return arguments;
}

Json run_ranks_of_size(const BenchCpOptions& options, int num_ranks) {
    std::string pattern = (std::filesystem::temp_directory_path() / "hcp-bench-XXXXXX").string();
    const int file = mkstemp(pattern.data());
    if (file < 0) {
        throw FormatError(fmt::format(
            "cannot make a file {}: set TMPDIR to a folder that can be written", pattern));
    }
    ::close(file);
    fmt::print(stderr, "bench cp: {} rank{} ...\n", num_ranks, num_ranks == 1 ? "" : "s");
    const int status = launch_local_ranks(
        {.num_ranks = num_ranks, .arguments = worker_arguments(options, pattern)});
    const std::string text = status == 0 ? read_file(pattern) : "";
    std::filesystem::remove(pattern);
    if (status == 2) {
        throw UsageError(fmt::format("bench cp: the ranks of size {} refused it", num_ranks));
    }
    if (status != 0) {
        throw CommError(fmt::format("bench cp: a rank of size {} failed", num_ranks));
    }
    return Json::parse(text);
}

double of_possible(const Json& result, double gather_ms, double share, int num_ranks) {
    const double gain = gather_ms / result.at("step_ms").at("median").get<double>();
    return gain / (1.0 + (num_ranks - 1) * share);
}

void add_gains(Json& size, double share) {
    const int num_ranks = size.at("ranks").get<int>();
    double gather_ms = 0.0;
    for (const Json& result : size.at("variants")) {
        if (result.at("name") == "gather_hidden") {
            gather_ms = result.at("step_ms").at("median").get<double>();
        }
    }
    for (Json& result : size.at("variants")) {
        if (gather_ms > 0.0 && num_ranks > 1) {
            result["gain"] = gather_ms / result.at("step_ms").at("median").get<double>();
            result["of_possible_gain"] = of_possible(result, gather_ms, share, num_ranks);
        }
    }
}

}  // namespace

std::vector<BenchVariant> bench_variants(const BenchCpOptions& options,
                                         const ParallelOptions& accelerator,
                                         const HeadCounts& heads,
                                         const std::string& dtype) {
    std::vector<std::string> names;
    for (const VariantWords& words : kVariants) {
        names.emplace_back(words.name);
    }
    for (const std::string& name : options.variants) {
        if (std::find(names.begin(), names.end(), name) == names.end()) {
            throw UsageError(
                fmt::format("bench cp --variants: unknown variant '{}': did you mean "
                            "{}? (known: {})",
                            name, nearest_word(name, names), fmt::join(names, ", ")));
        }
    }
    std::vector<BenchVariant> variants;
    for (const VariantWords& words : kVariants) {
        const bool wanted =
            options.variants.empty() || std::find(options.variants.begin(), options.variants.end(),
                                                  words.name) != options.variants.end();
        ParallelOptions choice = accelerator;
        choice.linear_attention_cp_mode = words.linear_mode;
        choice.sequence_layout = words.stream;
        choice.linear_attention_layout = words.linear_layout;
        choice.convert_to = words.convert_to;
        const Support support = check_support(choice, heads, dtype);
        if (wanted && !support.supported && !options.variants.empty()) {
            throw UsageError(fmt::format("bench cp --variants {}, {} ranks: {}", words.name,
                                         choice.cp, support.rule));
        }
        if (!wanted || !support.supported) {
            continue;
        }
        BenchVariant variant{words.name, make_parallel(choice, heads, dtype)};
        variant.parallel.elide_conversions = words.elide;
        variants.push_back(std::move(variant));
    }
    return variants;
}

std::string bench_cp_table(const Json& results) {
    const double share = results.at("linear_share").get<double>();
    std::string text = fmt::format(
        "{}, {} cores; {} at {} tokens, {}; linear mixers are {:.0f} % of a step on one rank "
        "({:.1f} of {:.1f} ms)\n",
        results.at("cpu").get<std::string>(), results.at("cores").get<int>(),
        results.at("level").get<std::string>(), results.at("tokens").get<std::int64_t>(),
        results.at("dtype").get<std::string>(), 100 * share, results.at("linear_ms").get<double>(),
        results.at("one_rank_ms").get<double>());
    text += fmt::format("{:>5}  {:<20} {:>9} {:>9} {:>9}  {:>7} {:>9}  {:>10} {:>9}  {:>9}\n",
                        "ranks", "variant", "median ms", "min", "p90", "gain", "possible",
                        "conversion", "MB sent", "peak MB");
    for (const Json& size : results.at("sizes")) {
        for (const Json& result : size.at("variants")) {
            const Json& ms = result.at("step_ms");
            const auto percent = [&](const char* key, double factor) {
                return result.contains(key)
                           ? fmt::format("{:.1f} %", factor * result.at(key).get<double>())
                           : std::string("-");
            };
            text += fmt::format(
                "{:>5}  {:<20} {:>9.1f} {:>9.1f} {:>9.1f}  {:>7} {:>9}  {:>10} {:>9.2f}  "
                "{:>9.1f}\n",
                size.at("ranks").get<int>(), result.at("name").get<std::string>(),
                ms.at("median").get<double>(), ms.at("min").get<double>(),
                ms.at("p90").get<double>(),
                result.contains("gain") ? fmt::format("{:.2f}x", result.at("gain").get<double>())
                                        : std::string("-"),
                percent("of_possible_gain", 100.0), percent("conversion_share", 100.0),
                result.at("megabytes_sent").get<double>(),
                result.at("peak_megabytes").get<double>());
        }
    }
    return text;
}

int bench_cp(const BenchCpOptions& options) {
    if (!options.worker_output.empty()) {
        return bench_cp_worker(options);
    }
    if (read_launch_environment().source != "single") {
        throw UsageError(
            "bench cp starts its ranks itself, one size after another: run it alone, without a "
            "launcher or --nproc");
    }
    if (options.level != "model" && options.level != "layer") {
        throw UsageError(fmt::format("bench cp --level {}: use model or layer", options.level));
    }
    const Recipe recipe = load_recipe(options.recipe_path, options.overrides);
    if (recipe.train.accelerator.fsdp) {
        throw UsageError(
            "bench cp keeps parameters whole: leave train.accelerator.fsdp out (bench train "
            "compares sharded ones)");
    }
    if (recipe.train.accelerator.device != "cpu") {
        throw UsageError(
            fmt::format("bench cp runs on device cpu, not {}: its ranks are processes "
                        "of this machine that talk over Gloo",
                        recipe.train.accelerator.device));
    }
    constexpr std::int64_t kMostTokens = 1 << 24;
    std::int64_t tokens = options.documents.empty() ? recipe.data.sequence_length : 0;
    for (const std::int64_t length : options.documents) {
        tokens += length;
    }
    if (tokens < 1 || tokens > kMostTokens) {
        throw UsageError(fmt::format("bench cp: {} tokens in all documents; 1 to {} can be timed",
                                     tokens, kMostTokens));
    }
    for (const int num_ranks : options.ranks) {  // refused before any rank starts
        ParallelOptions accelerator = recipe.train.accelerator;
        accelerator.dp = 1;
        accelerator.cp = num_ranks;
        (void)bench_variants(options, accelerator, recipe_model_config(recipe.model).head_counts(),
                             recipe.model.dtype);
    }
    // The share of the linear layers is that of ranks with as many threads as the others have.
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    const bool chosen = ::getenv("OMP_NUM_THREADS") != nullptr;
    const int smallest = *std::min_element(options.ranks.begin(), options.ranks.end());
    if (!chosen) {
        ::setenv("OMP_NUM_THREADS", std::to_string(std::max(1, cores / smallest)).c_str(), 1);
    }
    Json results = run_ranks_of_size(options, 1);
    if (!chosen) {
        ::unsetenv("OMP_NUM_THREADS");
    }
    results["cpu"] = cpu_name();
    results["cores"] = cores;
    results["version"] = HCP_VERSION;
    results["recipe"] = to_yaml(recipe);
    results["sizes"] = Json::array();
    for (const int num_ranks : options.ranks) {
        Json size = run_ranks_of_size(options, num_ranks);
        add_gains(size, results.at("linear_share").get<double>());
        results["sizes"].push_back(std::move(size));
    }
    fmt::print("{}", bench_cp_table(results));
    if (!options.report_path.empty()) {
        write_file_atomically(options.report_path, results.dump(2) + "\n");
    }
    return 0;
}

}  // namespace hybridcp::cli
