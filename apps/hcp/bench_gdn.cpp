#include "hcp/bench_gdn.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "core/files.h"
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
    check_word("bench gdn --gates", options.gates, {"ls16", "zero25", "none", "strong"});
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

Lane hugging_face_lane(const BenchGdnOptions& options, HuggingFacePeer& peer) {
    return {.name = "hf",
            .run = [&peer] { return peer.run(); },
            .isa = available_isas().back(),
            .repeats = options.peer_repeats,
            .warm_up = 0};  // the peer has warmed up when it was set up
}

/// All lanes by turns, the peaks of the core between them.
std::map<Isa, double> run_by_turns(std::vector<Lane>& lanes, at::ScalarType dtype) {
    int turns = 0;
    std::map<Isa, std::vector<double>> peaks;
    for (Lane& lane : lanes) {
        peaks[lane.isa] = {};
        turns = std::max(turns, lane.repeats);
        for (int i = 0; i < lane.warm_up; ++i) {
            (void)lane.run();
        }
    }
    for (int turn = 0; turn < turns; ++turn) {
        for (auto& [isa, samples] : peaks) {
            samples.push_back(measure_peak_flops(isa, dtype));
        }
        for (Lane& lane : lanes) {
            if (turn < lane.repeats) {
                lane.samples.push_back(lane.run());
            }
        }
    }
    std::map<Isa, double> medians;
    for (const auto& [isa, samples] : peaks) {
        medians[isa] = median(samples);
    }
    return medians;
}

/// The table comes when all sizes are done, which may take long.
void print_progress(const Json& run) {
    for (const Json& lane : run.at("lanes")) {
        for (const auto& [pass, entry] : lane.at("passes").items()) {
            fmt::print(stderr, "bench gdn:   {} {} {:.3f} us per token and value head\n",
                       lane.at("name").get<std::string>(), pass, entry.at("us").get<double>());
        }
    }
}

Json run_size(const BenchGdnOptions& options,
              const std::vector<GdnVariant>& variants,
              HuggingFacePeer* hugging_face,
              std::int64_t tokens,
              const std::string& dtype) {
    fmt::print(stderr, "bench gdn: {} tokens, {} ...\n", tokens, dtype);
    const at::ScalarType type = parse_bench_dtype("bench gdn", dtype);
    const GdnProblem problem = make_gdn_problem(options, {0, tokens}, tokens, type);
    std::vector<Lane> lanes;
    for (const GdnVariant& variant : variants) {
        lanes.push_back(variant_lane(options, variant, problem));
    }
    if (contains(options.peers, "brgemm")) {
        lanes.push_back(brgemm_lane(options, 32, tokens, type));
        lanes.push_back(brgemm_lane(options, 64, tokens, type));
    }
    if (hugging_face != nullptr) {
        hugging_face->set_up(options, tokens, dtype);
        lanes.push_back(hugging_face_lane(options, *hugging_face));
    }
    const std::map<Isa, double> peaks = run_by_turns(lanes, type);
    Json run = gdn_run_summary(options, lanes, peaks, tokens);
    run["dtype"] = dtype;
    print_progress(run);
    return run;
}

Json describe(const BenchGdnOptions& options) {
    return {{"cpu", cpu_name()},
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
    for (const std::string& dtype : options.dtypes) {
        for (const std::int64_t tokens : options.tokens) {
            results["runs"].push_back(
                run_size(options, variants, hugging_face.get(), tokens, dtype));
        }
    }
    results["flatness"] = gdn_flatness(results.at("runs"));
    fmt::print("{}", bench_gdn_table(results));
    if (!options.report_path.empty()) {
        write_file_atomically(options.report_path, results.dump(2) + "\n");
    }
    return 0;
}

}  // namespace hybridcp::cli
