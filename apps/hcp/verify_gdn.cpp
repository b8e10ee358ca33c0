// The delta rule against its golden cases: forward, backward, and the segment summaries of context
// parallelism, all through the contract that the distributed modes use (kernels/gdn/gdn.h).
#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <set>

#include "hcp/compare.h"
#include "hcp/verify_op.h"
#include "hybridcp/error.h"
#include "kernels/gdn/gdn.h"

namespace hybridcp::cli {

namespace {

constexpr std::array<const char*, 2> kRowMeasured = {"dq", "dk"};  // apart on zero and tiny rows
constexpr double kTinyRow =
    0x1p-8;  // of the largest row's norm: a zero or scaled row of edge_values

/// The bars of one regime (docs/numerics.md).
class GdnBars {
  public:
    GdnBars(std::string regime, const OpRun& run) : regime_(std::move(regime)), run_(run) {
        static const std::set<std::string> known = {"plain",        "unit_keys",   "no_decay",
                                                    "collinear",    "edge_values", "gate_neg_inf",
                                                    "strong_mixed", "strong_chain"};
        if (known.count(regime_) == 0) {
            throw FormatError(fmt::format("the manifest's regime '{}' has no bar (known: {})",
                                          regime_, fmt::join(known, ", ")));
        }
    }

    [[nodiscard]] double of(const std::string& tensor) const {
        if (run_.reference) {
            return kReferenceBar;
        }
        return run_.bf16 ? of_bf16(tensor) : of_fp32(tensor);
    }

  private:
    [[nodiscard]] double of_fp32(const std::string& tensor) const {
        if (regime_ == "strong_mixed" || regime_ == "collinear") {
            return 5e-5;
        }
        return regime_ == "strong_chain" && tensor == "dg" ? 1e-4 : 1e-5;
    }

    [[nodiscard]] double of_bf16(const std::string& tensor) const {
        struct Columns {
            double any_gate, no_decay, collinear;
        };
        Columns bars{5e-3, 8e-3, 5e-2};
        if (tensor == "dk") {
            bars = {6e-3, 1e-2, 5e-2};
        } else if (tensor == "dbeta") {
            bars = {6e-3, 1e-2, 0.1};
        } else if (tensor == "dg") {
            bars = {8e-3, 2.5e-2, 0.2};
        }
        return regime_ == "no_decay"    ? bars.no_decay
               : regime_ == "collinear" ? bars.collinear
                                        : bars.any_gate;
    }

    std::string regime_;
    OpRun run_;
};

void check_names(const OpCase& op_case) {
    std::vector<std::string> known = {"cu_seqlens", "seg.cuts",     "seg.M",       "seg.S_local",
                                      "seg.S_end",  "seg.dS_local", "seg.dS_start"};
    for (const char* name : {"q", "k", "v", "g", "beta", "h0", "o", "ht"}) {
        known.emplace_back(name);
        known.push_back(fmt::format("d{}", name));
    }
    op_case.check_names(known);
}

at::Tensor read_state(const OpCase& op_case, const OpRun& run, const std::string& name) {
    const at::ScalarType dtype = run.reference ? at::kDouble : at::kFloat;
    return op_case.has(name) ? op_case.read(name).to(run.device, dtype) : at::Tensor();
}

/// [B, T, ...] as the flat tokens [B T, ...].
at::Tensor read_tokens(const OpCase& op_case, const OpRun& run, const std::string& name) {
    const bool is_gate = name == "g";  // stays fp32: -60 has no good bf16 neighbour
    const at::ScalarType dtype = is_gate && run.bf16 ? at::kFloat : run.dtype;
    return op_case.read(name).to(run.device, dtype).flatten(0, 1);
}

std::shared_ptr<GdnCall> make_call(const OpCase& op_case,
                                   const OpRun& run,
                                   const std::vector<std::int64_t>& offsets) {
    const GdnInputs inputs{.q = read_tokens(op_case, run, "q"),
                           .k = read_tokens(op_case, run, "k"),
                           .v = read_tokens(op_case, run, "v"),
                           .g = read_tokens(op_case, run, "g"),
                           .beta = read_tokens(op_case, run, "beta")};
    const GdnOptions options{.use_qk_l2norm = op_case.option("use_qk_l2norm").get<bool>(),
                             .scale = op_case.option("scale").get<double>(),
                             .chunk_size = run.chunk_size};
    const GdnBackend backend = run.reference ? GdnBackend::kReference
                               : run.fused   ? GdnBackend::kFused
                                             : GdnBackend::kEager;
    return make_gdn_call(backend, inputs, offsets, options);
}

void add_heads(const std::string& name,
               const at::Tensor& actual,
               const at::Tensor& expected,
               std::int64_t head_dim,
               double bar,
               Report& report) {
    const Difference difference = relative_l2_per_head(actual, expected, head_dim, bar);
    report.add({.tensor = name,
                .measure = "rel-L2",
                .error = difference.error,
                .bar = bar,
                .where = difference.where});
}

/// dq and dk of zero and tiny rows are hundreds of times larger than the others: one comparison
/// each.
void add_rows_apart(const std::string& name,
                    const at::Tensor& gradient,
                    const OpCase& op_case,
                    double bar,
                    Report& report) {
    const at::Tensor rows = op_case.read(name.substr(1)).flatten(0, 1);  // [T, H, K]
    const at::Tensor expected = op_case.read(name).flatten(0, 1);
    const at::Tensor norms = rows.norm(2, {1, 2});
    const at::Tensor tiny = norms < kTinyRow * norms.max();
    const at::Tensor result = gradient.detach().to(at::kCPU);
    for (const bool is_tiny : {false, true}) {
        const at::Tensor index = (is_tiny ? tiny : tiny.logical_not()).nonzero().flatten();
        if (index.numel() > 0) {
            add_heads(name + (is_tiny ? " (tiny rows)" : ""), result.index_select(0, index),
                      expected.index_select(0, index), 1, bar, report);
        }
    }
}

void add_gradients(const OpCase& op_case,
                   const GdnGradients& gradients,
                   const GdnBars& bars,
                   Report& report) {
    const std::vector<std::pair<std::string, at::Tensor>> named = {{"dq", gradients.dq},
                                                                   {"dk", gradients.dk},
                                                                   {"dv", gradients.dv},
                                                                   {"dg", gradients.dg},
                                                                   {"dbeta", gradients.dbeta}};
    for (const auto& [name, gradient] : named) {
        if (std::find(kRowMeasured.begin(), kRowMeasured.end(), name) != kRowMeasured.end()) {
            add_rows_apart(name, gradient, op_case, bars.of(name), report);
        } else {
            add_heads(name, gradient, op_case.read(name).flatten(0, 1), 1, bars.of(name), report);
        }
    }
    if (op_case.has("dh0")) {
        add_heads("dh0", gradients.dS_start, op_case.read("dh0"), 1, bars.of("dh0"), report);
    }
    const at::Tensor reset = at::isinf(op_case.read("g").flatten(0, 1));
    if (reset.any().item<bool>()) {
        const at::Tensor at_resets = gradients.dg.detach().to(at::kCPU).masked_select(reset);
        const Difference difference = max_abs(at_resets, at::zeros_like(at_resets));
        report.add({.tensor = "dg at g = -inf",
                    .measure = "abs",
                    .error = difference.error,
                    .bar = 0.0,
                    .where = ""});
    }
}

/// The pieces between the cuts of the golden segments and the starts of documents, in order.
struct Pieces {
    std::vector<std::int64_t> offsets;      // [number of pieces + 1]
    std::vector<bool> starts_document;      // no state comes in
    std::vector<std::int64_t> first, last;  // of each golden segment
};

Pieces make_pieces(const OpCase& op_case, const std::vector<std::int64_t>& cuts) {
    std::vector<std::int64_t>
        starts;  // without cu_seqlens the row goes on from h0: no document starts in it
    if (op_case.has("cu_seqlens")) {
        starts = to_integers(op_case.read("cu_seqlens"));
    }
    std::set<std::int64_t> all(cuts.begin(), cuts.end());
    all.insert(starts.begin(), starts.end());
    Pieces pieces;
    pieces.offsets.assign(all.begin(), all.end());
    for (std::size_t i = 0; i + 1 < pieces.offsets.size(); ++i) {
        pieces.starts_document.push_back(
            std::find(starts.begin(), starts.end(), pieces.offsets[i]) != starts.end());
    }
    const auto piece_at = [&](std::int64_t token) {
        return std::lower_bound(pieces.offsets.begin(), pieces.offsets.end(), token) -
               pieces.offsets.begin();
    };
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        pieces.first.push_back(piece_at(cuts[i]));
        pieces.last.push_back(piece_at(cuts[i + 1]) - 1);
    }
    return pieces;
}

/// The state in which every piece starts: S_start = M S_start + S along the chain, as `p2p` does
/// it.
at::Tensor chain_forward(const Pieces& pieces, const GdnSummary& summary, const at::Tensor& h0) {
    at::Tensor state = h0.defined() ? h0[0] : at::zeros_like(summary.S[0]);
    std::vector<at::Tensor> starts;
    for (std::size_t i = 0; i < pieces.starts_document.size(); ++i) {
        if (pieces.starts_document[i]) {
            state = at::zeros_like(state);
        }
        starts.push_back(state);
        const auto piece = static_cast<std::int64_t>(i);
        state = at::matmul(summary.M[piece], state) + summary.S[piece];
    }
    return at::stack(starts);
}

/// The gradient of the state in which every piece ends.
at::Tensor chain_backward(const Pieces& pieces,
                          const at::Tensor& M,
                          const at::Tensor& dS_local,
                          const at::Tensor& dht) {
    at::Tensor gradient = dht.defined() ? dht[0] : at::zeros_like(dS_local[0]);
    std::vector<at::Tensor> ends(pieces.starts_document.size());
    for (std::size_t i = ends.size(); i-- > 0;) {
        ends[i] = gradient;
        const auto piece = static_cast<std::int64_t>(i);
        gradient = at::matmul(M[piece].transpose(-1, -2), gradient) + dS_local[piece];
        if (pieces.starts_document[i]) {
            gradient = at::zeros_like(gradient);
        }
    }
    return at::stack(ends);
}

/// The golden segments' summaries from those of the pieces: where a document starts inside a
/// segment, nothing of what comes before reaches its end (M = 0).
void compare_segments(const OpCase& op_case,
                      const OpRun& run,
                      const GdnBars& bars,
                      Report& report) {
    const Pieces pieces = make_pieces(op_case, to_integers(op_case.read("seg.cuts")));
    const auto call = make_call(op_case, run, pieces.offsets);
    const GdnSummary summary = call->summary();
    const at::Tensor starts = chain_forward(pieces, summary, read_state(op_case, run, "h0"));
    const GdnOutput output = call->forward(starts);
    const at::Tensor d_o = read_tokens(op_case, run, "do");
    const at::Tensor dS_local = call->gradient_summary(d_o);
    const at::Tensor ends =
        chain_backward(pieces, summary.M, dS_local, read_state(op_case, run, "dht"));
    const at::Tensor dS_start = call->backward(d_o, ends).dS_start;

    std::map<std::string, std::vector<at::Tensor>> segments;
    for (std::size_t i = 0; i < pieces.first.size(); ++i) {
        const std::int64_t first = pieces.first[i];
        const std::int64_t last = pieces.last[i];
        const bool enters = !pieces.starts_document[static_cast<std::size_t>(first)];
        const bool passes = enters && first == last;
        segments["seg.M"].push_back(passes ? summary.M[last] : at::zeros_like(summary.M[last]));
        segments["seg.S_local"].push_back(summary.S[last]);
        segments["seg.S_end"].push_back(output.S_end[last]);
        segments["seg.dS_local"].push_back(enters ? dS_local[first]
                                                  : at::zeros_like(dS_local[first]));
        segments["seg.dS_start"].push_back(enters ? dS_start[first]
                                                  : at::zeros_like(dS_start[first]));
    }
    for (const auto& [name, tensors] : segments) {
        add_heads(name, at::stack(tensors), op_case.read(name), 1, bars.of(name), report);
    }
    add_heads("o (by segments)", output.o, op_case.read("o").flatten(0, 1), 1, bars.of("o"),
              report);
}

}  // namespace

void compare_gdn(const OpCase& op_case, const OpRun& run, Report& report) {
    check_names(op_case);
    const GdnBars bars(op_case.option("regime").get<std::string>(), run);
    const at::Tensor q = op_case.read("q");  // [B, T, Hqk, K]
    const auto call = make_call(op_case, run, op_case.document_offsets(q.size(0), q.size(1)));
    const GdnOutput output = call->forward(read_state(op_case, run, "h0"));
    const GdnGradients gradients =
        call->backward(read_tokens(op_case, run, "do"), read_state(op_case, run, "dht"));
    add_heads("o", output.o, op_case.read("o").flatten(0, 1), 1, bars.of("o"), report);
    add_heads("ht", output.S_end, op_case.read("ht"), 1, bars.of("ht"), report);
    add_gradients(op_case, gradients, bars, report);
    if (op_case.has("seg.cuts")) {
        compare_segments(op_case, run, bars, report);
    }
}

}  // namespace hybridcp::cli
