// One optimizer step's forward and backward over the mesh: shards batches, sums losses and
// gradients so that the result is (sum of token losses) / (label count of all micro-batches and
// ranks), whatever the split; with experts, plus the weighted load-balancing loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hybridcp/layout.h"
#include "hybridcp/model.h"
#include "train/mesh.h"

namespace hybridcp {

/// A batch in the flat order (documents one after another; padding is not in it), before sharding
/// over cp.
struct TokenBatch {
    std::vector<std::int64_t> document_lengths;
    at::Tensor token_ids;  // [T] int64
    at::Tensor targets;    // [T] int64, already shifted, -100 ignored
};

/// Rows with a valid length each become documents; what lies beyond is padding and is dropped.
/// token_ids, targets [B, T]; valid_lengths [B] or empty for T each.
[[nodiscard]] TokenBatch batch_from_rows(const at::Tensor& token_ids,
                                         const at::Tensor& targets,
                                         const std::vector<std::int64_t>& valid_lengths = {});
/// The reverse for a flat [T, ...] tensor: [B, T_row, ...], exactly zero on padding.
[[nodiscard]] at::Tensor rows_from_flat(const at::Tensor& flat,
                                        const std::vector<std::int64_t>& valid_lengths,
                                        std::int64_t row_length);
/// A local [T_local, ...] tensor of each cp rank -> [T, ...] in the flat order, on every rank.
[[nodiscard]] at::Tensor gather_flat(const at::Tensor& local,
                                     const Layout& layout,
                                     Group& cp_group);

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
/// reduced over the world, equal bits on every rank. Errors: NumericsError naming the layer when a
/// loss or gradient is not finite.
[[nodiscard]] StepLoss forward_backward(const HybridModel& model,
                                        const std::vector<TokenBatch>& micro_batches,
                                        const Parallel& parallel,
                                        const Mesh& mesh);
/// Loss alone, no gradients (validation).
[[nodiscard]] StepLoss forward_only(const HybridModel& model,
                                    const std::vector<TokenBatch>& micro_batches,
                                    const Parallel& parallel,
                                    const Mesh& mesh);

}  // namespace hybridcp
