// One optimizer step's forward and backward over the mesh: shards batches, sums losses and
// gradients so that the result is (sum of token losses) / (label count of all micro-batches and
// ranks), whatever the split; with experts, plus the weighted load-balancing loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "hybridcp/model.h"
#include "train/mesh.h"
#include "train/sharded_parameters.h"
#include "train/token_batch.h"

namespace hybridcp {

struct StepLoss {
    double loss = 0.0;     // what is differentiated: ce_loss + router_aux_loss_coef * aux_loss
    double ce_loss = 0.0;  // global mean over valid targets; 0 without any
    // Load-balancing loss of a model with experts over all tokens of all ranks, mean over
    // micro-batches (train/router_balance.h).
    std::optional<double> aux_loss = std::nullopt;
    std::int64_t num_labels = 0;  // global
    std::int64_t num_tokens = 0;  // global
};

/// Forward and backward over this dp rank's micro-batches; gradients of all parameters end up
/// reduced over the world, equal bits on every rank; with `shards`, those of the model, in their
/// pieces. Errors: NumericsError naming the layer when a loss or gradient is not finite.
[[nodiscard]] StepLoss forward_backward(const HybridModel& model,
                                        const std::vector<TokenBatch>& micro_batches,
                                        const Parallel& parallel,
                                        const Mesh& mesh,
                                        ShardedParameters* shards = nullptr);
/// Loss alone, no gradients (validation).
[[nodiscard]] StepLoss forward_only(const HybridModel& model,
                                    const std::vector<TokenBatch>& micro_batches,
                                    const Parallel& parallel,
                                    const Mesh& mesh,
                                    ShardedParameters* shards = nullptr);

}  // namespace hybridcp
