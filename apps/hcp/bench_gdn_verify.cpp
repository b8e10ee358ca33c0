// Before `hcp bench gdn` times anything: outputs, states, summaries and all gradients against the
// token-by-token recurrence in fp64 on the same rounded inputs.
#include <ATen/ATen.h>

#include <algorithm>

#include "hcp/bench_gdn.h"
#include "hcp/bench_measure.h"
#include "hcp/compare.h"

namespace hybridcp::cli {

namespace {

struct Layout {
    std::int64_t tokens;
    std::vector<std::int64_t> offsets;
    bool summary;  // compared too: M of many tokens is little but its own rounding
};
// One with a part of a chunk at its end; packed: shorter than a chunk, empty, longer than one, and
// padding. On a GPU also one that takes the kernels of long segments (docs/gdn-cuda.md,
// "Operands").
std::vector<Layout> layouts_of(const std::string& device) {
    std::vector<Layout> layouts{{300, {0, 300}, true}, {300, {0, 37, 37, 101, 290}, true}};
    if (device == "cuda") {
        layouts.push_back({2100, {0, 2100}, false});
    }
    return layouts;
}

struct Results {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
};

/// Through all methods, in the order of the distributed modes.
Results compute(const GdnVariant& variant, const GdnProblem& problem, bool with_summary) {
    std::optional<ForcedIsa> forced;
    if (variant.isa) {
        forced.emplace(*variant.isa);
    }
    const auto call = make_call(variant, problem);
    const GdnSummary summary = call->summary();
    const GdnOutput output = call->forward(problem.S_start);
    const at::Tensor dS = call->gradient_summary(problem.d_o);
    const GdnGradients gradients = call->backward(problem.d_o, problem.dS_end);
    Results results{{{"o", output.o},
                     {"S_end", output.S_end},
                     {"dS", dS},
                     {"dq", gradients.dq},
                     {"dk", gradients.dk},
                     {"dv", gradients.dv},
                     {"dg", gradients.dg},
                     {"dbeta", gradients.dbeta},
                     {"dS_start", gradients.dS_start}}};
    if (with_summary) {
        results.tensors.emplace_back("S", summary.S);
        results.tensors.emplace_back("M", summary.M);
    }
    return results;
}

GdnProblem in_fp64(const GdnProblem& problem) {
    GdnProblem wide = problem;
    for (at::Tensor* x : {&wide.inputs.q, &wide.inputs.k, &wide.inputs.v, &wide.inputs.g,
                          &wide.inputs.beta, &wide.d_o, &wide.S_start, &wide.dS_end}) {
        *x = x->to(at::kDouble);
    }
    return wide;
}

double bar_of(const std::string& tensor, at::ScalarType dtype, const std::string& gates) {
    if (dtype != at::kBFloat16) {
        return gates == "strong" ? 1e-4 : 1e-5;
    }
    return tensor == "dg" ? 8e-3 : tensor == "dk" || tensor == "dbeta" ? 6e-3 : 5e-3;
}

void compare(const Results& actual,
             const Results& expected,
             const GdnProblem& problem,
             const std::string& gates,
             Report& report) {
    const std::int64_t end = problem.offsets.back(), tokens = problem.inputs.q.size(0);
    for (std::size_t i = 0; i < expected.tensors.size(); ++i) {
        const auto& [name, reference] = expected.tensors[i];
        const at::Tensor tensor = actual.tensors[i].second.cpu();
        const double bar = bar_of(name, problem.inputs.q.scalar_type(), gates);
        const Difference difference = relative_l2_per_head(tensor, reference, 1, bar);
        report.add({name, "rel-L2", difference.error, bar, difference.where});
        if (tensor.size(0) == tokens && end < tokens) {
            const at::Tensor padding = tensor.slice(0, end);
            const Difference nonzero = max_abs(padding, at::zeros_like(padding));
            report.add({name + " of padding", "abs", nonzero.error, 0.0, nonzero.where});
        }
    }
}

}  // namespace

std::vector<Report> verify_gdn_variants(const BenchGdnOptions& options,
                                        const std::vector<GdnVariant>& variants) {
    // The reference holds every state: few heads, as many value heads to a key head as asked for.
    BenchGdnOptions few = options;
    const std::int64_t group = options.value_heads / options.key_heads;
    few.key_heads = std::min<std::int64_t>(options.key_heads, group == 1 ? 2 : 1);
    few.value_heads = few.key_heads * group;
    std::vector<Report> reports;
    for (const std::string& dtype : options.dtypes) {
        for (const auto& [tokens, offsets, with_summary] : layouts_of(options.device)) {
            const GdnProblem problem =
                make_gdn_problem(few, offsets, tokens, parse_bench_dtype("bench gdn", dtype));
            const Results expected =
                compute({"reference", GdnBackend::kReference}, in_fp64(problem), with_summary);
            for (const GdnVariant& variant : variants) {
                Report report(fmt::format("gdn {}, {} tokens {}, {}, gates {}", variant.name,
                                          tokens, offsets.size() > 2 ? "packed" : "in one", dtype,
                                          options.gates));
                compare(compute(variant, on_device(problem, options.device), with_summary),
                        expected, problem, options.gates, report);
                reports.push_back(std::move(report));
            }
        }
    }
    return reports;
}

}  // namespace hybridcp::cli
