// What the gradients kernel reads, made in fp64 from the formulas of docs/gdn-cuda.md and rounded
// to what the kernels before it leave.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/gdn/cuda/problem.cuh"
#include "kernels/gdn/gdn.h"

namespace hybridcp::test {

enum class Gates { kSlow, kNone, kStrong, kMixed, kWithReset };

struct GradientsCase {
    std::string name;
    std::vector<std::int64_t> offsets;
    std::int64_t key_heads = 1;
    std::int64_t group = 1;
    Gates gates = Gates::kSlow;
    bool use_qk_l2norm = true;
    bool has_d_o = true;
    bool has_states = true;  // start states and gradients of end states
    bool beta_is_bf16 = false;
    bool heads_first = false;    // g and dg are [heads, tokens] in memory
    std::int64_t poisoned = -1;  // this segment's inputs are NaN
    std::int64_t padding = 0;    // NaN tokens after the last segment
    std::uint32_t blocks = 2;    // at most; fewer than chunks x key heads: some take several
    std::uint64_t seed = 1;
    /// Of operands in bf16 larger where few tokens miss the bar of 8e-3, for which backward takes
    /// fp16.
    double bf16_dg_bar = 8e-3;
    double value_size = 1, gradient_size = 1;  // of v and start states, of d_o and dS_end
    int head_step = 0;  // each head's values are so many binades above, gradients twice so many
                        // below those of the head before
};

/// Inputs as the kernels take them, before any poison: q, k, v, d_o and beta rounded.
struct GradientsProblem {
    GdnInputs inputs;            // fp64
    at::Tensor d_o;              // [T, Hv, 128]
    at::Tensor S_start, dS_end;  // [N, Hv, 128, 128]
    std::vector<std::int64_t> offsets;
    double scale;
    bool use_qk_l2norm;
};
[[nodiscard]] GradientsProblem make_problem(const GradientsCase& wanted);

/// The contract's answer in fp64.
[[nodiscard]] GdnGradients reference_gradients(const GradientsProblem& problem);

/// By value head and chunk, as problem.cuh lays them out, in fp16 over the powers of two that
/// `largest` says; E and Z by token and value head, NaN beyond the segments.
struct Images {
    std::vector<std::uint16_t> errors, value_gradients;
    std::vector<std::uint8_t> inverses, states, state_gradients;
};
struct Remade {
    std::vector<gdn::cuda::Chunk> chunks;
    Images images;
    std::vector<std::uint32_t> largest, largest_gradients;  // [Hv]
    at::Tensor r_k, r_q;                                    // [Hqk, T] fp32
};
[[nodiscard]] Remade remake(const GradientsProblem& problem);

/// bf16 or fp32 as bits.
[[nodiscard]] std::vector<std::uint16_t> bf16_of(const at::Tensor& x);
[[nodiscard]] std::vector<float> floats_of(const at::Tensor& x);

}  // namespace hybridcp::test
