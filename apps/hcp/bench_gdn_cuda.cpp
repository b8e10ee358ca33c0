#include "hcp/bench_gdn_cuda.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "hcp/bench_measure.h"
#include "hybridcp/error.h"

#ifdef HCP_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace hybridcp::cli {

namespace {

using Json = nlohmann::json;

#ifdef HCP_CUDA

// Measured on an H200: a bf16 matrix product of 8192^3, and a copy (read + write).
constexpr double kProductFlops = 790e12;
constexpr double kCopyBytes = 4.3e12;

/// The larger of time for operations and time for bytes, in ms: docs/benchmarks.md, GPU.
double limit_ms(const BenchGdnOptions& options, std::int64_t tokens, const std::string& pass) {
    const double group =
        static_cast<double>(options.value_heads) / static_cast<double>(options.key_heads);
    constexpr double kUnitFlops = 16384.0;  // 64 x 64 x 128 products, a token and head
    const bool forward = pass == "forward";
    const double flops = kUnitFlops * (forward ? 8.1 + 2 / group : 19 + 5 / group);
    const double bytes = forward ? 518 + 512 / group : 1420 + 1024 / group;
    const auto count = static_cast<double>(tokens * options.value_heads);
    return 1e3 * count * std::max(flops / kProductFlops, bytes / kCopyBytes);
}

constexpr int kWarmUps = 5;
constexpr std::int64_t kFlushBytes = 256 << 20;  // more than the second-level cache
constexpr int kProblems = 2;                     // random inputs that take turns
// Before each series of times: after a tenth of a second at full power the GPU lowers its clock, so
// what ran before would be part of the result.
constexpr std::chrono::milliseconds kRest{500};

/// One variant on rotating inputs; the call is made, and forward run, outside what is timed of
/// backward.
class Passes {
  public:
    Passes(const BenchGdnOptions& options, const GdnVariant& variant, std::int64_t tokens)
        : variant_(variant) {
        for (int i = 0; i < kProblems; ++i) {
            problems_.push_back(
                on_device(make_gdn_problem(options, {0, tokens}, tokens, at::kBFloat16), "cuda"));
        }
    }
    void prepare(const std::string& pass, int turn) {
        if (pass != "forward") {
            call_ = make_call(variant_, problem(turn));
            if (pass == "gradient_summary") {
                (void)call_->summary();  // as every mode that asks for it has
            }
            (void)call_->forward({});
        }
    }
    void run(const std::string& pass, int turn) {
        if (pass == "forward") {
            call_ = make_call(variant_, problem(turn));
            output_ = call_->forward({});
        } else if (pass == "backward") {
            gradients_ = call_->backward(problem(turn).d_o, {});
        } else if (pass == "summary") {
            summary_ = call_->summary();
        } else {
            d_state_ = call_->gradient_summary(problem(turn).d_o);
        }
    }
    void drop() {
        call_.reset();
        output_ = {};
        gradients_ = {};
        summary_ = {};
        d_state_ = at::Tensor();
    }

  private:
    [[nodiscard]] const GdnProblem& problem(int turn) const {
        return problems_.at(static_cast<std::size_t>(turn) % problems_.size());
    }
    GdnVariant variant_;
    std::vector<GdnProblem> problems_;
    std::shared_ptr<GdnCall> call_;
    GdnOutput output_;
    GdnGradients gradients_;
    GdnSummary summary_;
    at::Tensor d_state_;
};

struct Samples {
    std::vector<double> ms;
    [[nodiscard]] Json summary() const {
        std::vector<double> sorted = ms;
        std::sort(sorted.begin(), sorted.end());
        return {{"median_ms", median(ms)},
                {"min_ms", sorted.front()},
                {"p90_ms", sorted.at(sorted.size() * 9 / 10)}};
    }
};

template <typename Run>
double timed_ms(at::Tensor& flush, Run run) {
    flush.zero_();
    at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
    begin.record();
    run();
    end.record();
    end.synchronize();
    return begin.elapsed_time(end);
}

/// Launches, and the same launches replayed as a graph.
Json time_pass(const BenchGdnOptions& options, Passes& passes, const std::string& pass) {
    at::Tensor flush = at::empty({kFlushBytes}, at::TensorOptions(at::kCUDA).dtype(at::kByte));
    Samples launched, replayed;
    std::this_thread::sleep_for(kRest);
    for (int turn = 0; turn < kWarmUps + options.repeats; ++turn) {
        passes.prepare(pass, turn);
        const double ms = timed_ms(flush, [&] { passes.run(pass, turn); });
        if (turn >= kWarmUps) {
            launched.ms.push_back(ms);
        }
    }
    passes.prepare(pass, 0);
    at::cuda::CUDAGraph graph;
    {
        const c10::cuda::CUDAStream side = c10::cuda::getStreamFromPool();
        const c10::cuda::CUDAStreamGuard guard(side);
        side.synchronize();
        graph.capture_begin();
        passes.run(pass, 0);
        graph.capture_end();
    }
    std::this_thread::sleep_for(kRest);
    for (int turn = 0; turn < kWarmUps + options.repeats; ++turn) {
        const double ms = timed_ms(flush, [&] { graph.replay(); });
        if (turn >= kWarmUps) {
            replayed.ms.push_back(ms);
        }
    }
    passes.drop();
    return {{"launched", launched.summary()}, {"replayed", replayed.summary()}};
}

/// Bytes that forward and backward allocate at most on top of the inputs.
double peak_bytes(Passes& passes) {
    using c10::cuda::CUDACachingAllocator::getDeviceStats;
    const c10::DeviceIndex device = c10::cuda::current_device();
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    passes.drop();
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::resetPeakStats(device);
    const auto before = getDeviceStats(device).allocated_bytes.at(kAll).current;
    passes.run("forward", 0);
    passes.run("backward", 0);
    c10::cuda::device_synchronize();
    const auto peak = getDeviceStats(device).allocated_bytes.at(kAll).peak;
    passes.drop();
    return static_cast<double>(peak - before);
}

Json time_hugging_face(const BenchGdnOptions& options, HuggingFacePeer& peer, std::int64_t tokens) {
    peer.set_up(options, tokens, "bf16");
    std::map<std::string, std::vector<double>> ms;
    LaneTimes last;
    for (int turn = 0; turn <= options.peer_repeats; ++turn) {
        last = peer.run();
        for (const auto& [pass, us] : last.us) {
            if (turn > 0) {  // the first warms up
                ms[pass].push_back(1e-3 * us);
            }
        }
    }
    return {{"forward_ms", median(ms.at("forward"))},
            {"backward_ms", median(ms.at("backward"))},
            {"peak_bytes", last.bytes.at("forward+backward")}};
}

#endif

/// Of forward and backward, launched; nan if one of them was not timed.
double both_ms(const Json& lane) {
    double ms = 0;
    for (const char* pass : {"forward", "backward"}) {
        const Json& passes = lane.at("passes");
        ms += passes.contains(pass) ? passes.at(pass).at("launched").at("median_ms").get<double>()
                                    : std::nan("");
    }
    return ms;
}

std::string hugging_face_text(const Json& run) {
    if (!run.contains("hf")) {
        return "";
    }
    const Json& hf = run.at("hf");
    const double forward = hf.at("forward_ms"), backward = hf.at("backward_ms");
    std::string text = fmt::format("{:>7} {:<27} forward {:.1f}, backward {:.1f}, {:.0f} MiB;",
                                   run.at("tokens").get<std::int64_t>(), "hf", forward, backward,
                                   hf.at("peak_bytes").get<double>() / 1048576);
    for (const Json& lane : run.at("lanes")) {
        text += fmt::format(" {:.0f} times {}", (forward + backward) / both_ms(lane),
                            lane.at("name").get<std::string>());
    }
    return text + "\n";
}

std::string peers_text(const Json& run, const std::string& pass) {
    std::string text;
    for (const Json& peer : run.at("peers")) {
        const double ms = peer.value(pass + "_ms", 0.0);
        const double graph = peer.value(pass + "_graph_ms", 0.0);
        if (ms > 0) {
            text += fmt::format(" {} {:.3f}{}", peer.at("peer").get<std::string>(), ms,
                                graph > 0 ? fmt::format(" [{:.3f}]", graph) : std::string());
        }
    }
    return text;
}

}  // namespace

Json bench_gdn_on_cuda([[maybe_unused]] const BenchGdnOptions& options,
                       [[maybe_unused]] const std::vector<GdnVariant>& variants,
                       [[maybe_unused]] HuggingFacePeer* hugging_face) {
#ifdef HCP_CUDA
    Json runs = Json::array();
    for (const std::int64_t tokens : options.tokens) {
        Json run{{"tokens", tokens}, {"peers", Json::array()}, {"lanes", Json::array()}};
        for (const GdnPeerTime& peer :
             gdn_peer_times(options.key_heads, options.value_heads, tokens, options.gates)) {
            run["peers"].push_back({{"peer", peer.peer},
                                    {"forward_ms", peer.forward_ms},
                                    {"forward_graph_ms", peer.forward_graph_ms},
                                    {"backward_ms", peer.backward_ms},
                                    {"backward_graph_ms", peer.backward_graph_ms}});
        }
        for (const GdnVariant& variant : variants) {
            Passes passes(options, variant, tokens);
            Json lane{{"name", variant.name}, {"passes", Json::object()}};
            for (const std::string& pass : options.passes) {
                lane["passes"][pass] = time_pass(options, passes, pass);
            }
            lane["peak_bytes"] = peak_bytes(passes);
            run["lanes"].push_back(std::move(lane));
        }
        if (hugging_face != nullptr) {
            run["hf"] = time_hugging_face(options, *hugging_face, tokens);
        }
        for (const char* pass : {"forward", "backward"}) {
            run["limit_ms"][pass] = limit_ms(options, tokens, pass);
        }
        runs.push_back(std::move(run));
    }
    return runs;
#else
    throw UsageError("bench gdn --device cuda: this build has no CUDA; configure with HCP_CUDA=ON");
#endif
}

std::string bench_gdn_cuda_table(const Json& results) {
    std::string text = fmt::format(
        "{}; {} key and {} value heads, K = V = 128, bf16, gates {}; ms\n"
        "{:>7} {:<16} {:<10} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  {}\n",
        results.at("device").get<std::string>(), results.at("key_heads").get<int>(),
        results.at("value_heads").get<int>(), results.at("gates").get<std::string>(), "tokens",
        "pass", "variant", "median", "min", "p90", "graph", "limit", "of limit", "peak MiB",
        "peers on an H200 [graph]");
    for (const Json& run : results.at("runs")) {
        for (const Json& lane : run.at("lanes")) {
            for (const auto& [pass, times] : lane.at("passes").items()) {
                const double median_ms = times.at("launched").at("median_ms");
                const double limit = run.at("limit_ms").value(pass, std::nan(""));
                text += fmt::format(
                    "{:>7} {:<16} {:<10} {:>8.3f} {:>8.3f} {:>8.3f} {:>8.3f} {:>8.3f} {:>7.1f}% "
                    "{:>8.0f} {}\n",
                    run.at("tokens").get<std::int64_t>(), pass, lane.at("name").get<std::string>(),
                    median_ms, times.at("launched").at("min_ms").get<double>(),
                    times.at("launched").at("p90_ms").get<double>(),
                    times.at("replayed").at("median_ms").get<double>(), limit,
                    100 * limit / median_ms, lane.at("peak_bytes").get<double>() / 1048576,
                    peers_text(run, pass));
            }
        }
        text += hugging_face_text(run);
    }
    return text;
}

}  // namespace hybridcp::cli
