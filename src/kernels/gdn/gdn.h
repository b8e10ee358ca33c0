// Gated DeltaNet over packed local segments: the contract that every backend fulfils
// (docs/numerics.md has the tolerances, docs/kernels.md the maths). One value head h reads key head
// h / (Hv/Hqk). Per token, in fp32 or better:
//     S <- exp(g) S;   u = beta (v - S^T k^);   S <- S + k^ u^T;   o = S^T q^
// with k^ = k rsqrt(|k|^2 + 1e-6), q^ = scale * q rsqrt(|q|^2 + 1e-6). A segment maps its start
// state to its end state by S_end = M S_start + S; the summary (S, M) is all that other ranks need
// of it. Legend: T local tokens, N segments, Hqk/Hv key and value heads, K/V their dims.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace hybridcp {

enum class GdnBackend { kReference, kEager, kFused };

namespace gdn {
class ChunkLayout;
}

/// Segments [offsets[i], offsets[i+1]) of the local tokens, and what a backend derives from them:
/// made once and kept, so that every layer of a batch shares it. Copies share it too.
class GdnSegments {
  public:
    GdnSegments(std::vector<std::int64_t> offsets);  // NOLINT(google-explicit-constructor)
    GdnSegments(std::initializer_list<std::int64_t> offsets)
        : GdnSegments(std::vector<std::int64_t>(offsets)) {}

    [[nodiscard]] const std::vector<std::int64_t>& offsets() const { return offsets_; }
    /// The tokens in chunks of `chunk_size`; those of the last call are kept.
    [[nodiscard]] std::shared_ptr<const gdn::ChunkLayout> chunks(
        std::int64_t num_tokens, std::int64_t chunk_size, const at::TensorOptions& options) const;
    /// Where a backend keeps what else it derives from the offsets.
    [[nodiscard]] std::shared_ptr<const void>& backend_tables() const;

  private:
    struct Cache;
    std::vector<std::int64_t> offsets_;
    std::shared_ptr<Cache> cache_;
};

struct GdnInputs {
    at::Tensor q;     // [T, Hqk, K] fp32, bf16 or fp64
    at::Tensor k;     // [T, Hqk, K]
    at::Tensor v;     // [T, Hv, V]
    at::Tensor g;     // [T, Hv] log decay <= 0, -inf allowed; fp32 or fp64
    at::Tensor beta;  // [T, Hv]
};

struct GdnOptions {
    bool use_qk_l2norm = true;
    std::optional<double> scale = std::nullopt;  // K^-1/2 when not given; 0 is 0
    std::int64_t chunk_size = 64;                // eager only; fused has its own
    /// Summaries leave out tokens whose effect on the other end of the segment is below
    /// exp(summary_floor), which holds for keys of unit length and beta in [0, 2]. eager and fused
    /// on the CPU, with use_qk_l2norm only; kExactSummary, which changes no bit, when not given.
    /// kFastSummary is under the rounding of fp32 next to a state.
    std::optional<double> summary_floor = std::nullopt;
    /// forward() may keep what backward() else makes again, where that is faster and fits in memory
    /// (fused on CUDA): for a forward pass that backward follows at once.
    bool keep_intermediates = true;
    /// The share of them that it keeps, in [0, 1]: less makes forward faster and backward slower.
    double kept_share = 1.0;
    static constexpr double kFastSummary = -25.0;
    static constexpr double kExactSummary = -104.0;
};

struct GdnSummary {
    at::Tensor S;  // [N, Hv, K, V] end state from a zero start
    at::Tensor M;  // [N, Hv, K, K]
};

struct GdnOutput {
    at::Tensor o;      // [T, Hv, V] in v's dtype
    at::Tensor S_end;  // [N, Hv, K, V]
};

struct GdnGradients {
    at::Tensor dq, dk, dv, dg, dbeta;  // shapes and dtypes of the inputs
    at::Tensor dS_start;               // [N, Hv, K, V]
};

/// One call over one set of inputs (taken without autograd). It keeps what its methods share, so
/// that summary() followed by forward() prepares once; backward() and gradient_summary() need
/// forward() first and may be called more than once. States are fp32 (fp64 in `reference`).
/// Segments are [offsets[i], offsets[i+1]), empty ones allowed; tokens from offsets.back() on are
/// padding: outputs and gradients there are exactly zero.
class GdnCall {
  public:
    virtual ~GdnCall() = default;
    /// For each segment and value head, [N * Hv]: its gates forget so much that the end state does
    /// not depend on the start state (options.summary_floor). M is zero there, and not computed.
    /// Null where the backend does not tell, whatever the segments.
    [[nodiscard]] virtual const std::vector<bool>* independent() const = 0;
    [[nodiscard]] virtual GdnSummary summary() = 0;
    /// S_start: [N, Hv, K, V], or undefined for zeros. An empty segment has S_end = S_start.
    [[nodiscard]] virtual GdnOutput forward(const at::Tensor& S_start) = 0;
    /// Gradient of the segment's own outputs with respect to its start state, [N, Hv, K, V].
    [[nodiscard]] virtual at::Tensor gradient_summary(const at::Tensor& d_o) = 0;
    /// Frees what the other methods can compute again from the inputs and S_start: the next one of
    /// them takes the time of another forward() too.
    virtual void release_intermediates() = 0;
    /// d_o: [T, Hv, V] or undefined for zeros; dS_end: [N, Hv, K, V] or undefined for zeros.
    [[nodiscard]] virtual GdnGradients backward(const at::Tensor& d_o,
                                                const at::Tensor& dS_end) = 0;
};

/// Errors: UsageError for shapes that do not fit, Hv not a multiple of Hqk, offsets that do not
/// start at 0 or decrease or exceed T, or a dtype that is not supported.
[[nodiscard]] std::shared_ptr<GdnCall> make_gdn_call(GdnBackend backend,
                                                     const GdnInputs& inputs,
                                                     const GdnSegments& segments,
                                                     const GdnOptions& options);

}  // namespace hybridcp
