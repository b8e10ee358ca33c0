#include "hcp/bench_gdn.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "core/files.h"
#include "hcp/bench_gdn_cuda.h"
#include "hcp/bench_measure.h"
#include "hcp/bench_peers.h"
#include "hybridcp/error.h"

namespace hybridcp::cli {

namespace {

using Json = nlohmann::json;

bool contains(const std::vector<std::string>& words, const std::string& word) {
    return std::find(words.begin(), words.end(), word) != words.end();
}

void check_options(const BenchGdnOptions& options) {
    for (const std::string& dtype : options.dtypes) {
        (void)parse_bench_dtype("bench gdn", dtype);
    }
    check_word("bench gdn --gates", options.gates, {"ls16", "zero25", "none", "strong", "qwen"});
    check_word("bench gdn --device", options.device, {"cpu", "cuda"});
    if (options.device == "cuda" && !(options.dtypes == std::vector<std::string>{"bf16"})) {
        throw UsageError("bench gdn --device cuda times bf16: add --dtype bf16");
    }
    if (options.device == "cuda" && contains(options.peers, "brgemm")) {
        throw UsageError("bench gdn --device cuda: the peer brgemm runs on the CPU; --peer hf");
    }
    for (const std::string& pass : options.passes) {
        check_word("bench gdn --pass", pass,
                   {"forward", "backward", "summary", "gradient_summary"});
    }
    for (const std::string& peer : options.peers) {
        check_word("bench gdn --peer", peer, {"hf", "brgemm"});
    }
    if (options.value_heads % options.key_heads != 0) {
        throw UsageError(
            fmt::format("bench gdn: --value-heads {} is not a multiple of --key-heads {}",
                        options.value_heads, options.key_heads));
    }
}

/// All that is timed at one length; the lanes refer to the problem.
struct SizeRun {
    std::int64_t tokens = 0;
    GdnProblem problem;
    std::vector<Lane> lanes;
    std::map<Isa, std::vector<double>> peaks;
};

Lane hugging_face_lane(const BenchGdnOptions& options,
                       HuggingFacePeer& peer,
                       std::int64_t tokens,
                       const std::string& dtype) {
    return {.name = "hf",
            .run =
                [&options, &peer, tokens, dtype] {
                    peer.set_up(options, tokens, dtype);  // and warms up; it measures itself
                    return peer.run();
                },
            .isa = available_isas().back(),
            .repeats = options.peer_repeats,
            .warm_up = 0};
}

std::unique_ptr<SizeRun> make_size(const BenchGdnOptions& options,
                                   const std::vector<GdnVariant>& variants,
                                   std::int64_t tokens,
                                   at::ScalarType dtype) {
    auto size = std::make_unique<SizeRun>();
    size->tokens = tokens;
    size->problem = make_gdn_problem(options, {0, tokens}, tokens, dtype);
    for (const GdnVariant& variant : variants) {
        size->lanes.push_back(variant_lane(options, variant, size->problem));
    }
    if (contains(options.peers, "brgemm")) {
        size->lanes.push_back(brgemm_lane(options, 32, tokens, dtype));
        size->lanes.push_back(brgemm_lane(options, 64, tokens, dtype));
    }
    return size;
}

/// One turn: the peaks of the core, then every lane that has repeats left.
void take_turn(SizeRun& size, at::ScalarType dtype, int turn) {
    for (const Lane& lane : size.lanes) {
        std::vector<double>& peaks = size.peaks[lane.isa];
        if (static_cast<int>(peaks.size()) <= turn) {
            peaks.push_back(measure_peak_flops(lane.isa, dtype));
        }
    }
    for (Lane& lane : size.lanes) {
        if (turn < lane.repeats) {
            lane.samples.push_back(lane.run());
        }
    }
}

/// All lengths by turns too: their ratios must not show how busy the machine was meanwhile.
void run_by_turns(const std::vector<std::unique_ptr<SizeRun>>& sizes,
                  const std::string& dtype,
                  at::ScalarType type) {
    int turns = 0;
    for (const auto& size : sizes) {
        for (Lane& lane : size->lanes) {
            turns = std::max(turns, lane.repeats);
            for (int i = 0; i < lane.warm_up; ++i) {
                (void)lane.run();
            }
        }
    }
    for (int turn = 0; turn < turns; ++turn) {
        for (const auto& size : sizes) {
            fmt::print(stderr, "bench gdn: {}, turn {} of {}, {} tokens ...\n", dtype, turn + 1,
                       turns, size->tokens);
            take_turn(*size, type, turn);
        }
    }
}

/// Adds an element to `runs` for each length.
void run_dtype(const BenchGdnOptions& options,
               const std::vector<GdnVariant>& variants,
               HuggingFacePeer* hugging_face,
               const std::string& dtype,
               Json& runs) {
    const at::ScalarType type = parse_bench_dtype("bench gdn", dtype);
    std::vector<std::unique_ptr<SizeRun>> sizes;
    for (const std::int64_t tokens : options.tokens) {
        sizes.push_back(make_size(options, variants, tokens, type));
        if (hugging_face != nullptr) {
            sizes.back()->lanes.push_back(hugging_face_lane(options, *hugging_face, tokens, dtype));
        }
    }
    run_by_turns(sizes, dtype, type);
    for (const auto& size : sizes) {
        std::map<Isa, double> peaks;
        for (const auto& [isa, samples] : size->peaks) {
            peaks[isa] = median(samples);
        }
        Json run = gdn_run_summary(options, size->lanes, peaks, size->tokens);
        run["dtype"] = dtype;
        runs.push_back(std::move(run));
    }
}

Json describe(const BenchGdnOptions& options) {
    return {{"cpu", cpu_name()},
            {"device", options.device},
            {"version", HCP_VERSION},
            {"threads", options.threads},
            {"gates", options.gates},
            {"key_heads", options.key_heads},
            {"value_heads", options.value_heads},
            {"key_dim", options.key_dim},
            {"value_dim", options.value_dim},
            {"repeats", options.repeats},
            {"peer_repeats", options.peer_repeats},
            {"flops_per_token_and_value_head", gdn_flops(options, kCountedChunk, true)},
            {"flops_dense_64", gdn_flops(options, 64, false)},
            {"runs", Json::array()}};
}

void write_report(const BenchGdnOptions& options, const Json& results) {
    if (!options.report_path.empty()) {
        write_file_atomically(options.report_path, results.dump(2) + "\n");
    }
}

}  // namespace

int bench_gdn(const BenchGdnOptions& options) {
    check_options(options);
    const std::vector<GdnVariant> variants = gdn_variants(options);
    for (const std::string& dtype : options.dtypes) {
        if (contains(options.peers, "brgemm")) {  // refuses before anything takes time
            (void)brgemm_lane(options, 32, 1, parse_bench_dtype("bench gdn", dtype));
        }
    }
    at::set_num_threads(options.threads);
    std::unique_ptr<HuggingFacePeer> hugging_face;
    if (contains(options.peers, "hf")) {
        hugging_face = std::make_unique<HuggingFacePeer>(options.python, options.threads);
    }
    const std::vector<Report> reports = verify_gdn_variants(options, variants);
    if (!print_verdict(reports)) {
        return 1;
    }
    Json results = describe(options);
    for (const Report& report : reports) {
        results["verified"].push_back(report.to_json());
    }
    if (hugging_face) {
        results["hf"] = hugging_face->versions();
    }
    if (options.device == "cuda") {
        results["runs"] = bench_gdn_on_cuda(options, variants, hugging_face.get());
        fmt::print("{}", bench_gdn_cuda_table(results));
        write_report(options, results);
        return 0;
    }
    for (const std::string& dtype : options.dtypes) {
        run_dtype(options, variants, hugging_face.get(), dtype, results["runs"]);
    }
    results["flatness"] = gdn_flatness(results.at("runs"));
    fmt::print("{}", bench_gdn_table(results));
    write_report(options, results);
    return 0;
}

}  // namespace hybridcp::cli
