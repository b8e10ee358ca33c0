// The router of a mixture of experts: which experts a token goes to and with which weights, and the
// load-balancing loss that keeps experts in use. See docs/moe.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hybridcp {

/// What a router says of T tokens, k experts each.
struct Routing {
    at::Tensor experts;           // [T, k] int64, by descending probability
    at::Tensor weights;           // [T, k] of the logits' dtype; a row sums to one. Differentiable
    at::Tensor counts;            // [E] int64, tokens that chose each expert; sums to T k
    at::Tensor probability_sums;  // [E] fp64, sum of the rows of softmax(logits). Differentiable
};

/// softmax(logits) over the experts, in fp32 (fp64 for fp64). [T, E]
[[nodiscard]] at::Tensor router_probabilities(const at::Tensor& logits);

/// The k most probable experts of each token; of equal probabilities the lower expert first. Their
/// weights are their probabilities divided by the sum of the k, in fp32, then rounded to the
/// logits' dtype. Differentiable in the logits, through weights and probability_sums.
/// Shapes: logits [T, E] fp32, bf16 or fp64; T may be 0.
/// Errors: UsageError unless 1 <= num_chosen <= E.
[[nodiscard]] Routing route(const at::Tensor& logits, std::int64_t num_chosen);

/// The load-balancing loss over rows that were routed, of any number of layers and ranks, is
/// E sum_e f_e P_e, with f_e the fraction of rows that chose e (they sum to k) and P_e its mean
/// probability. f is a constant, so the loss is the dot product of the probability sums with the
/// coefficients that this returns, which are therefore its gradient too: E counts / rows^2.
/// Shapes: counts [E] and num_rows [], summed over all rows; returns [E] fp64, zeros without rows.
[[nodiscard]] at::Tensor load_balancing_coefficients(const at::Tensor& counts,
                                                     const at::Tensor& num_rows);

}  // namespace hybridcp
