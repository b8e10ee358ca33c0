// The problems of `hcp bench gdn`, its variants, and how one of them is timed.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "hcp/bench_gdn.h"
#include "hcp/bench_measure.h"
#include "hybridcp/error.h"
#include "train/tensor_memory.h"

namespace hybridcp::cli {

namespace {

constexpr std::int64_t kLongestReference = 2048;  // its graph holds several states a token

struct BackendWord {
    const char* name;
    GdnBackend backend;
    bool has_isas;  // kernels compiled per instruction set
};

constexpr std::array kBackends{
    BackendWord{"reference", GdnBackend::kReference, false},
    BackendWord{"eager", GdnBackend::kEager, false},
    BackendWord{"fused", GdnBackend::kFused, true},
};

/// [T, Hv] log decays.
at::Tensor make_gates(const BenchGdnOptions& options, std::int64_t num_tokens) {
    const at::Tensor noise = at::randn({num_tokens, options.value_heads});
    if (options.gates == "none") {
        return at::zeros_like(noise);
    }
    if (options.gates == "strong") {
        return at::softplus(noise + 1).mul_(-16);  // as a head of A = 16: about -21 a token
    }
    if (options.gates == "qwen") {  // as a new model has them: A in (0, 16), dt_bias 1
        const at::Tensor rates = at::rand({options.value_heads}).mul_(16);
        return at::softplus(noise + 1).mul_(rates).neg_();
    }
    const at::Tensor g = at::log_sigmoid(noise).div_(16);
    if (options.gates == "zero25") {
        const std::int64_t num_open = std::max<std::int64_t>(1, (options.value_heads + 2) / 4);
        g.narrow(1, 0, num_open).zero_();
    }
    return g;
}

bool asks_for(const BenchGdnOptions& options, const std::string& pass) {
    return std::find(options.passes.begin(), options.passes.end(), pass) != options.passes.end();
}

}  // namespace

std::vector<GdnVariant> gdn_variants(const BenchGdnOptions& options) {
    std::vector<std::string> known;
    for (const BackendWord& word : kBackends) {
        known.emplace_back(word.name);
    }
    for (const std::string& name : options.backends) {
        check_word("bench gdn --backend", name, known);
    }
    const std::vector<Isa> isas = parse_bench_isas("bench gdn --isa", options.isas);
    std::vector<GdnVariant> variants;
    for (const BackendWord& word : kBackends) {
        const bool wanted = options.backends.empty()
                                ? word.backend != GdnBackend::kReference
                                : std::find(options.backends.begin(), options.backends.end(),
                                            word.name) != options.backends.end();
        if (!wanted) {
            continue;
        }
        if (!word.has_isas || options.device != "cpu") {
            if (!word.has_isas) {
                variants.push_back({word.name, word.backend});
                continue;
            }
            for (const double share : options.kept_shares) {  // fused on a GPU
                const std::string kept = share <= 0.0   ? ""
                                         : share >= 1.0 ? " kept"
                                                        : fmt::format(" kept {}", share);
                variants.push_back({word.name + kept, word.backend});
                variants.back().kept_share = share;
            }
            continue;
        }
        for (const Isa isa : isas) {
            variants.push_back({fmt::format("{} {}", word.name, isa_name(isa)), word.backend, isa});
        }
    }
    for (const GdnVariant& variant : variants) {
        for (const std::int64_t tokens : options.tokens) {
            if (variant.backend == GdnBackend::kReference && tokens > kLongestReference) {
                throw UsageError(
                    fmt::format("bench gdn: the reference keeps every state and would need {} "
                                "states for {} tokens; use --tokens up to {}",
                                tokens, tokens, kLongestReference));
            }
        }
    }
    return variants;
}

GdnProblem make_gdn_problem(const BenchGdnOptions& options,
                            const std::vector<std::int64_t>& offsets,
                            std::int64_t num_tokens,
                            at::ScalarType dtype) {
    at::manual_seed(17);
    const auto noise = [&](std::int64_t heads, std::int64_t dim) {
        return at::randn({num_tokens, heads, dim}).to(dtype);
    };
    GdnProblem problem;
    problem.inputs = {.q = noise(options.key_heads, options.key_dim),
                      .k = noise(options.key_heads, options.key_dim),
                      .v = noise(options.value_heads, options.value_dim),
                      .g = make_gates(options, num_tokens),
                      .beta = at::sigmoid(at::randn({num_tokens, options.value_heads})).to(dtype)};
    problem.d_o = noise(options.value_heads, options.value_dim);
    const std::vector<std::int64_t> states{static_cast<std::int64_t>(offsets.size()) - 1,
                                           options.value_heads, options.key_dim, options.value_dim};
    // As large as states are: a sum of products of unit keys and unit normal values.
    const double size = 1.0 / std::sqrt(static_cast<double>(options.key_dim));
    problem.S_start = at::randn(states).mul_(size);
    problem.dS_end = at::randn(states).mul_(size);
    problem.offsets = offsets;
    problem.segments = GdnSegments(offsets);
    return problem;
}

GdnProblem on_device(const GdnProblem& problem, const std::string& device) {
    GdnProblem moved = problem;
    for (at::Tensor* x : {&moved.inputs.q, &moved.inputs.k, &moved.inputs.v, &moved.inputs.g,
                          &moved.inputs.beta, &moved.d_o, &moved.S_start, &moved.dS_end}) {
        *x = x->to(at::Device(device));
    }
    return moved;
}

std::shared_ptr<GdnCall> make_call(const GdnVariant& variant, const GdnProblem& problem) {
    return make_gdn_call(variant.backend, problem.inputs, problem.segments,
                         {.summary_floor = GdnOptions::kFastSummary,
                          .keep_intermediates = variant.kept_share > 0.0,
                          .kept_share = variant.kept_share});
}

Lane variant_lane(const BenchGdnOptions& options,
                  const GdnVariant& variant,
                  const GdnProblem& problem) {
    const bool summaries = asks_for(options, "summary") || asks_for(options, "gradient_summary");
    const bool backward = summaries || asks_for(options, "backward");
    const auto run = [variant, &problem, summaries, backward] {
        std::optional<ForcedIsa> forced;
        if (variant.isa) {
            forced.emplace(*variant.isa);
        }
        LaneTimes times;
        {
            const TensorMemory memory;
            Stopwatch watch(max_threads());
            const auto call = make_call(variant, problem);
            const GdnOutput output = call->forward(at::Tensor());
            times.us["forward"] = watch.lap_us();
            times.bytes["forward"] = static_cast<double>(memory.peak_bytes());
            if (backward) {
                Stopwatch backward_watch(max_threads());
                const GdnGradients gradients = call->backward(problem.d_o, at::Tensor());
                times.us["backward"] = backward_watch.lap_us();
                times.bytes["forward+backward"] = static_cast<double>(memory.peak_bytes());
            }
        }
        if (summaries) {  // what they add: they share the call's preparation with the passes
            Stopwatch watch(max_threads());
            const auto call = make_call(variant, problem);
            const GdnSummary summary = call->summary();
            const GdnOutput output = call->forward(at::Tensor());
            times.us["summary"] = watch.lap_us() - times.us["forward"];
            Stopwatch backward_watch(max_threads());
            const at::Tensor dS = call->gradient_summary(problem.d_o);
            const GdnGradients gradients = call->backward(problem.d_o, at::Tensor());
            times.us["gradient_summary"] = backward_watch.lap_us() - times.us["backward"];
        }
        return times;
    };
    return {.name = variant.name,
            .run = run,
            .isa = variant.isa.value_or(available_isas().back()),
            .repeats = options.repeats};
}

std::map<std::string, double> gdn_flops(const BenchGdnOptions& options,
                                        std::int64_t chunk,
                                        bool half_triangles) {
    const auto K = static_cast<double>(options.key_dim), V = static_cast<double>(options.value_dim);
    const double group =
        static_cast<double>(options.value_heads) / static_cast<double>(options.key_heads);
    const double with_state = 2 * K * V;                  // one product with a state, a token
    const double whole = 2 * static_cast<double>(chunk);  // C x C with C x D, times D
    const double half = half_triangles ? whole / 2 : whole;
    return {{"forward", 3 * with_state + 2 * half * V + 2 * half * K / group},
            {"backward", 7 * with_state + 5 * half * V + (4 * half + whole) * K / group}};
}

}  // namespace hybridcp::cli
