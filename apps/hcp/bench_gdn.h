// `hcp bench gdn`: the gated delta rule, each backend (and instruction set) verified against the
// fp64 reference, then timed by turns with the others, with Transformers' op and with bare matrix
// products. docs/benchmarks.md says what is counted.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "hcp/report.h"
#include "kernels/gdn/gdn.h"
#include "kernels/simd/isa.h"

namespace hybridcp::cli {

struct BenchGdnOptions {
    std::vector<std::int64_t> tokens{8192, 16384, 32768};
    std::int64_t key_heads = 4;
    std::int64_t value_heads = 4;
    std::int64_t key_dim = 128;
    std::int64_t value_dim = 128;
    std::vector<std::string> dtypes{"bf16", "fp32"};
    std::string device = "cpu";         // cpu | cuda
    std::string gates = "ls16";         // ls16 | zero25 | none | strong | qwen
    std::vector<std::string> backends;  // empty: all but reference
    std::vector<std::string> isas;      // of backends with kernels per ISA; empty: the selected
    std::vector<std::string> passes{"forward", "backward"};
    std::vector<std::string> peers;  // hf | brgemm
    std::string python = "python3";  // of the peer hf
    int threads = 1;
    int repeats = 5;
    int peer_repeats = 2;  // of hf, which takes minutes where the others take seconds
    /// Of fused on a GPU: what forward keeps for backward, as GdnOptions has it.
    std::vector<double> kept_shares{0.0, 0.4, 1.0};
    std::string report_path;
};

/// One way to compute it here.
struct GdnVariant {
    std::string name;
    GdnBackend backend = GdnBackend::kEager;
    std::optional<Isa> isa = std::nullopt;  // forced while it runs
    double kept_share = 1.0;                // GdnOptions
};

/// The variants that --backend and --isa ask for. Errors: UsageError for one that is not known, or
/// that this CPU lacks.
[[nodiscard]] std::vector<GdnVariant> gdn_variants(const BenchGdnOptions& options);

struct GdnProblem {
    GdnInputs inputs;
    at::Tensor d_o;      // [T, Hv, V]
    at::Tensor S_start;  // [N, Hv, K, V] fp32
    at::Tensor dS_end;
    std::vector<std::int64_t> offsets;
    GdnSegments segments = {0};  // the same, with what backends keep beside them
};

/// q, k, v and d_o ~ N(0, 1), beta = sigmoid(N(0, 1)), log decays by options.gates; one seed.
[[nodiscard]] GdnProblem make_gdn_problem(const BenchGdnOptions& options,
                                          const std::vector<std::int64_t>& offsets,
                                          std::int64_t num_tokens,
                                          at::ScalarType dtype);

/// A copy of the tensors on "cpu" or "cuda".
[[nodiscard]] GdnProblem on_device(const GdnProblem& problem, const std::string& device);

/// The call as a layer makes it: summaries leave out what fp32 does not see.
[[nodiscard]] std::shared_ptr<GdnCall> make_call(const GdnVariant& variant,
                                                 const GdnProblem& problem);

/// All results of every variant against fp64, on short problems with the same head dims, as one
/// sequence and packed.
[[nodiscard]] std::vector<Report> verify_gdn_variants(const BenchGdnOptions& options,
                                                      const std::vector<GdnVariant>& variants);

/// Microseconds of one call by pass, and bytes by pass where they are known.
struct LaneTimes {
    std::map<std::string, double> us;
    std::map<std::string, double> bytes;
};

/// One row of the table: what is timed by turns with the others.
struct Lane {
    std::string name;
    std::function<LaneTimes()> run;
    Isa isa = Isa::kPortable;  // whose peak it is compared with
    int repeats = 1;
    int warm_up = 1;
    std::vector<LaneTimes> samples = {};
};

[[nodiscard]] Lane variant_lane(const BenchGdnOptions& options,
                                const GdnVariant& variant,
                                const GdnProblem& problem);

/// Useful floating-point operations per token and value head: {forward, backward}; see
/// docs/benchmarks.md. `half_triangles` counts half of each product with a triangular factor or
/// result.
[[nodiscard]] std::map<std::string, double> gdn_flops(const BenchGdnOptions& options,
                                                      std::int64_t chunk,
                                                      bool half_triangles);
inline constexpr std::int64_t kCountedChunk = 32;

/// One element of results["runs"] from the samples of its lanes and the measured peaks.
[[nodiscard]] nlohmann::json gdn_run_summary(const BenchGdnOptions& options,
                                             const std::vector<Lane>& lanes,
                                             const std::map<Isa, double>& peaks,
                                             std::int64_t tokens);
/// us per token over the numbers of tokens, by dtype, lane and pass.
[[nodiscard]] nlohmann::json gdn_flatness(const nlohmann::json& runs);
[[nodiscard]] std::string bench_gdn_table(const nlohmann::json& results);

[[nodiscard]] int bench_gdn(const BenchGdnOptions& options);

}  // namespace hybridcp::cli
