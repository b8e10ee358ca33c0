// One forward and backward pass with everything that a recorded case holds, in the flat order of
// the batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "hybridcp/model.h"
#include "train/step.h"

namespace hybridcp::cli {

/// By the names of the golden data: loss, loss_per_token, hidden.I, hidden.norm, logits, grad.NAME,
/// with experts also ce_loss, aux_loss, router_logits.I. Tokens are [T].
using ModelResults = std::map<std::string, at::Tensor>;

/// Runs the batch over the mesh's cp ranks (dp is 1); every rank returns all of it.
[[nodiscard]] ModelResults run_model(const HybridModel& model,
                                     const TokenBatch& batch,
                                     const Parallel& parallel,
                                     const Mesh& mesh);

}  // namespace hybridcp::cli
