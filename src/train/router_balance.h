// The load-balancing loss of a mixture of experts over the ranks of a job (docs/moe.md): fractions
// and mean probabilities are averaged over all ranks before they are multiplied, so value and
// gradient do not depend on how tokens are split.
#pragma once

#include <ATen/core/Tensor.h>

#include "hybridcp/group.h"
#include "hybridcp/model.h"

namespace hybridcp {

class RouterBalance {
  public:
    /// For one step of `num_micro_batches` of this rank; other ranks may have another number. The
    /// group holds every rank that shares the parameters, and outlives it. A dense model exchanges
    /// nothing. Comm: one all-reduce of an integer (op "router_balance").
    RouterBalance(const HybridModel& model, std::int64_t num_micro_batches, Group& world);

    /// Takes in the next micro-batch. Returns the gradient of this step's weighted loss
    /// (coefficient times the mean over micro-batches) with respect to result.probability_sums:
    /// [E] fp64, or undefined when there is none.
    /// Comm: one all-reduce of 2 E + 1 fp64 (op "router_balance").
    [[nodiscard]] at::Tensor add(const ForwardResult& result);

    /// The load-balancing loss, mean over the micro-batches; the same bits on every rank. Nothing
    /// for a dense model. Every rank calls it before its next exchange. Comm: the all-reduces of
    /// micro-batches that only other ranks have.
    [[nodiscard]] std::optional<double> finish();

  private:
    [[nodiscard]] at::Tensor reduce(at::Tensor statistics);

    const ModelConfig& config_;
    at::TensorOptions options_;  // fp64 on the model's device
    Group& world_;
    std::int64_t num_rounds_ = 0;  // micro-batches of the rank that has most
    std::int64_t num_done_ = 0;
    at::Tensor loss_sum_;  // fp64
};

/// Backward pass of scale * loss_sum, and of the load-balancing loss where `d_probability_sums` (of
/// RouterBalance::add) is defined. Gradients are left in the parameters.
void run_backward(const at::Tensor& loss_sum,
                  double scale,
                  const ForwardResult& result,
                  const at::Tensor& d_probability_sums);

}  // namespace hybridcp
