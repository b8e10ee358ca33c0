// Cross-entropy of the language-model head, in chunks of rows: [T, vocabulary] never exists in fp32
// (nor at all in the fused form). The sum, not the mean, is returned: the caller divides by the
// label count of all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hybridcp {

inline constexpr std::int64_t kIgnoredTarget = -100;

struct CrossEntropy {
    at::Tensor loss_sum;        // [] fp32, differentiable in hidden and weight (or logits)
    at::Tensor loss_per_token;  // [T] fp32, 0 where ignored, no gradient
};

/// logits = hidden weight^T. The gradients of the sum are formed chunk by chunk in the forward pass
/// and scaled in backward, so no logits are kept. fp32 accumulation of dweight whatever the dtype
/// of hidden. Shapes: hidden [T, d] fp32 or bf16; weight [vocabulary, d] same dtype or fp32;
/// targets [T] int64, -100 is ignored. Errors: UsageError for a target outside the vocabulary.
[[nodiscard]] CrossEntropy cross_entropy_lm_head(const at::Tensor& hidden,
                                                 const at::Tensor& weight,
                                                 const at::Tensor& targets,
                                                 std::int64_t rows_per_chunk = 1024);

/// The same from given logits [T, vocabulary] (tests and `verify op`).
[[nodiscard]] CrossEntropy cross_entropy_logits(const at::Tensor& logits,
                                                const at::Tensor& targets);

}  // namespace hybridcp
