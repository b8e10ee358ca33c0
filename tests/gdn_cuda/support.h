// What the tests of the Hopper kernels of Gated DeltaNet share: inputs, the tables of a launch,
// tensors as the emulator sees them and comparisons by head.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/gdn/cuda/problem.cuh"
#include "kernels/gdn/gdn.h"
#include "simt/launch.h"

namespace hybridcp::test {

using Offsets = std::vector<std::int64_t>;

/// Random inputs: q, k, v in bf16, g in fp32, beta in bf16 or fp32, start states in fp32. The last
/// head decays fastest, each before it 4 times slower; of three or more head 1 does not decay.
struct GdnProblem {
    GdnInputs inputs;
    at::Tensor S_start;  // [segments, Hv, 128, 128]; undefined for zeros
    Offsets offsets;
    GdnOptions options;

    [[nodiscard]] std::int64_t tokens() const { return inputs.v.size(0); }
    [[nodiscard]] std::int64_t heads() const { return inputs.v.size(1); }
    [[nodiscard]] std::int64_t key_heads() const { return inputs.k.size(1); }
    [[nodiscard]] std::int64_t segments() const {
        return static_cast<std::int64_t>(offsets.size()) - 1;
    }
};
struct ProblemOptions {
    Offsets offsets;
    std::int64_t key_heads = 1;
    std::int64_t group = 1;
    bool start_states = true;
    double qk_scale = 1.0;
    double log_decay = -1.0;  // of the fastest head's mean token; 0: no head decays
    bool fp32_beta = false;
    std::uint64_t seed = 1;
};
[[nodiscard]] GdnProblem make_problem(const ProblemOptions& options);

/// The contract's answer in fp64 from the same, rounded, inputs.
[[nodiscard]] GdnOutput reference_forward(const GdnProblem& problem);

/// Chunks and pieces of packed segments; each segment that is not empty is cut in up to `pieces`.
struct Tables {
    std::vector<gdn::cuda::Chunk> chunks;
    std::vector<gdn::cuda::Piece> pieces;
};
[[nodiscard]] Tables make_tables(const Offsets& offsets, int pieces = 1);

[[nodiscard]] gdn::cuda::Shape shape_of(const GdnProblem& problem, const Tables& tables);
[[nodiscard]] gdn::cuda::GateInputs gates_of(const GdnProblem& problem);
/// [tokens, heads, 128] in boxes of 64 tokens and 64 columns.
[[nodiscard]] simt::TensorMap tensor_map(const at::Tensor& x);
/// What a launch may touch.
[[nodiscard]] simt::Buffer buffer(const at::Tensor& x, bool writable = true);
template <class T>
[[nodiscard]] simt::Buffer buffer(const std::vector<T>& x) {
    return {x.data(), x.size() * sizeof(T), false};
}
/// A tensor whose bytes are all 0xff: NaN.
[[nodiscard]] at::Tensor poisoned(at::IntArrayRef shape, at::ScalarType type);

/// Tiles with the 128-byte swizzle, as problem.cuh lays them out: [..., panels, 64, 64] of 2 bytes.
[[nodiscard]] at::Tensor unswizzled(const at::Tensor& panels);

/// Where an element of T lies in its image, in bytes; in blocks up to the diagonal.
[[nodiscard]] std::uint32_t inverse_at(std::uint32_t row, std::uint32_t column);

/// |x - reference| / |reference|; infinite where x is not finite.
[[nodiscard]] double relative_error(const at::Tensor& x, const at::Tensor& reference);
/// Each head (dim 1) of [tokens, heads, n] over the segments' tokens within `bar`, and each chunk
/// of 64 tokens of a segment within 4 times as much.
void expect_rows_close(const at::Tensor& x,
                       const at::Tensor& reference,
                       const Offsets& offsets,
                       double bar,
                       const std::string& what);
/// Each (segment, head) of [segments, heads, ...] within `bar`.
void expect_states_close(const at::Tensor& x,
                         const at::Tensor& reference,
                         double bar,
                         const std::string& what);

}  // namespace hybridcp::test
