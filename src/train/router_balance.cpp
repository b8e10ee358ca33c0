#include "train/router_balance.h"

#include <torch/csrc/autograd/autograd.h>

#include "kernels/moe/router.h"

namespace hybridcp {

namespace {
constexpr const char* kOp = "router_balance";
}  // namespace

RouterBalance::RouterBalance(const HybridModel& model, std::int64_t num_micro_batches, Group& world)
    : config_(model.config()),
      options_(at::TensorOptions(model.parameters().front().value.device()).dtype(at::kDouble)),
      world_(world),
      num_rounds_(num_micro_batches),
      loss_sum_(at::zeros({}, options_)) {
    if (config_.has_experts() && world_.size() > 1) {
        at::Tensor most = at::full({1}, num_rounds_, options_.dtype(at::kLong));
        world_.all_reduce_max(kOp, most);
        num_rounds_ = most.item<std::int64_t>();
    }
}

at::Tensor RouterBalance::add(const ForwardResult& result) {
    if (!config_.has_experts()) {
        return {};
    }
    // Rows of all layers together; each makes num_experts_per_tok choices.
    const at::Tensor counts = result.expert_counts.to(at::kDouble);
    const at::Tensor num_rows = counts.sum() / config_.num_experts_per_tok;
    const at::Tensor coefficients =
        reduce(at::cat({counts, result.probability_sums.detach(), num_rows.unsqueeze(0)}));
    if (config_.router_aux_loss_coef == 0.0) {
        return {};
    }
    return coefficients * (config_.router_aux_loss_coef / static_cast<double>(num_rounds_));
}

std::optional<double> RouterBalance::finish() {
    if (!config_.has_experts()) {
        return std::nullopt;
    }
    while (num_done_ < num_rounds_) {
        (void)reduce(at::zeros({2 * config_.num_experts + 1}, options_));
    }
    return num_rounds_ > 0 ? loss_sum_.item<double>() / static_cast<double>(num_rounds_) : 0.0;
}

/// Sums over the ranks and adds this round's loss; returns its coefficients.
at::Tensor RouterBalance::reduce(at::Tensor statistics) {
    if (world_.size() > 1) {
        world_.all_reduce_sum(kOp, statistics);
    }
    const std::int64_t num_experts = config_.num_experts;
    const at::Tensor coefficients = load_balancing_coefficients(
        statistics.narrow(0, 0, num_experts), statistics[2 * num_experts]);
    loss_sum_ += coefficients.dot(statistics.narrow(0, num_experts, num_experts));
    ++num_done_;
    return coefficients;
}

void run_backward(const at::Tensor& loss_sum,
                  double scale,
                  const ForwardResult& result,
                  const at::Tensor& d_probability_sums) {
    std::vector<at::Tensor> roots{loss_sum};
    std::vector<at::Tensor> gradients{at::full_like(loss_sum, scale)};
    if (d_probability_sums.defined()) {
        roots.push_back(result.probability_sums);
        gradients.push_back(d_probability_sums);
    }
    torch::autograd::backward(roots, gradients);
}

}  // namespace hybridcp
