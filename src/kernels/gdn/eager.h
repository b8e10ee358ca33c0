// The chunked backend in tensor operations: what its files share. docs/kernels.md derives the
// formulas; comments name tensors as there. Work inside a chunk is batched over all chunks and
// heads; only two products a step are serial. With decay gamma_i = e^{b_i} from the start of the
// chunk, B = b_C and W = T (beta gamma K):
//     D  = T (beta V) - W H                  new values        T = (I + L)^-1
//     H' = e^B H + (e^{B-b} K)^T D           state
// and in reverse, for the gradient of the state:
//     dD = P^T dO + (e^{B-b} K) dH'
//     dH = e^B dH' + (s gamma Q)^T dO - W^T dD
// Legend: n chunks of C rows; A = n*Hqk and B = n*Hv matrices, one per chunk and head, the heads of
// a chunk next to each other; G = Hv/Hqk value heads read one key head.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/gdn/backends.h"
#include "kernels/gdn/chunk_layout.h"
#include "kernels/gdn/summary_windows.h"

namespace hybridcp::gdn {

/// What one pass over the inputs gives and every method uses.
struct ChunkFactors {
    std::int64_t group = 1;     // G
    at::Tensor q, k;            // [A, C, K] normalised, q not scaled
    at::Tensor q_norm, k_norm;  // [A, C, 1] 1/|q|, 1/|k|; undefined without l2norm
    at::Tensor beta;            // [B, C, 1]
    at::Tensor gamma;           // [B, C, 1] e^b
    at::Tensor decay_to_end;    // [B, C, 1] e^{B-b}
    at::Tensor chunk_decay;     // [B, 1, 1] e^B
    at::Tensor log_decay;       // [B] B in fp64
    at::Tensor decay;           // [B, C, C] e^{b_i-b_j} for i >= j, else 0
    at::Tensor qk;              // [A, C, C] s q k^T
    at::Tensor kk;              // [A, C, C] k k^T
    at::Tensor system;          // [B, C, C] L below the diagonal; the rest is not read
    at::Tensor q_read;          // [B, C, K] s gamma q: what reads the state
    at::Tensor k_write;         // [B, C, K] e^{B-b} k: what writes the state
    at::Tensor k_erase;         // [B, C, K] W
};

/// x [A, ...] times y [B, ...], a key head's matrix with those of its `group` value heads; shapes
/// broadcast.
[[nodiscard]] at::Tensor times_value_heads(const at::Tensor& x,
                                           const at::Tensor& y,
                                           std::int64_t group);
/// Sum of x [B, ...] over the `group` value heads of each key head: [A, ...].
[[nodiscard]] at::Tensor sum_value_heads(const at::Tensor& x, std::int64_t group);
/// (I + L)^-1 x for x [B, C, D]; `system` as in ChunkFactors.
[[nodiscard]] at::Tensor solve(const at::Tensor& system, const at::Tensor& x);
/// (I + L)^-T x.
[[nodiscard]] at::Tensor solve_transposed(const at::Tensor& system, const at::Tensor& x);

[[nodiscard]] ChunkFactors make_chunk_factors(const Problem& problem,
                                              const ChunkLayout& layout,
                                              at::ScalarType type);

/// A serial pass over the chunks, forward or in reverse.
struct StatePass {
    at::Tensor
        states;  // [B, K, V] at the start (reverse: gradient at the end) of each chunk, if kept
    at::Tensor values;  // [B, C, V] D (reverse: dD)
    at::Tensor last;    // [N*Hv, K, V] end states (reverse: gradients of the start states)
};

enum class KeepStates : bool { kNo, kYes };

/// Runs the recurrence from `first` [N*Hv, K, V]; overwrites `values` = T (beta V) with D.
[[nodiscard]] StatePass run_forward(const ChunkFactors& factors,
                                    const ChunkLayout& layout,
                                    const at::Tensor& first,
                                    const at::Tensor& values,
                                    KeepStates keep);

/// The gradient of the outputs, in chunk layout.
struct OutputGradient {
    at::Tensor d_o;     // [B, C, V] dO
    at::Tensor values;  // [B, C, V] P^T dO
};

/// Runs the reverse recurrence from `first` = dS_end; overwrites `gradient.values` with dD.
[[nodiscard]] StatePass run_reverse(const ChunkFactors& factors,
                                    const ChunkLayout& layout,
                                    const at::Tensor& first,
                                    const OutputGradient& gradient,
                                    KeepStates keep);

/// (S | M) of every segment, [N*Hv, K, V+K] in the layout's order, from `values` = T (beta V),
/// which is left as it is; only the chunks in the windows are walked.
[[nodiscard]] at::Tensor summarize_windows(const ChunkFactors& factors,
                                           const ChunkLayout& layout,
                                           const SummaryWindows& windows,
                                           const at::Tensor& values);

/// dS of every segment, [N*Hv, K, V] in the layout's order; `gradient` is left as it is.
[[nodiscard]] at::Tensor gradient_summary_windows(const ChunkFactors& factors,
                                                  const ChunkLayout& layout,
                                                  const SummaryWindows& windows,
                                                  const OutputGradient& gradient);

/// All that the gradients inside the chunks need.
struct ChunkPasses {
    const StatePass& forward;
    const StatePass& reverse;
    const OutputGradient& gradient;
};

[[nodiscard]] GdnGradients chunk_gradients(const Problem& problem,
                                           const ChunkLayout& layout,
                                           const ChunkFactors& factors,
                                           const ChunkPasses& passes);

}  // namespace hybridcp::gdn
