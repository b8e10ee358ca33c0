#include "train/optimizer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/memory_class.h"
#include "hybridcp/error.h"

namespace hybridcp {

AdamW::AdamW(std::vector<ParameterPiece> pieces, AdamWOptions options)
    : pieces_(std::move(pieces)), options_(options) {
    const MemoryScope scope(MemoryClass::kOptimizer);
    for (const ParameterPiece& piece : pieces_) {
        exp_avg_.push_back(at::zeros_like(piece.value, at::kFloat));
        exp_avg_sq_.push_back(at::zeros_like(piece.value, at::kFloat));
    }
}

void AdamW::step(double learning_rate) {
    const at::NoGradGuard no_grad;
    const MemoryScope scope(MemoryClass::kOptimizer);
    const auto [beta1, beta2] = options_.betas;
    ++num_updates_;
    const double correction1 = 1.0 - std::pow(beta1, num_updates_);
    const double correction2 = 1.0 - std::pow(beta2, num_updates_);
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
        at::Tensor value = pieces_[i].value;
        const at::Tensor& grad = value.grad();
        if (!grad.defined()) {
            throw CheckError(fmt::format("optimizer: {} has no gradient", pieces_[i].name));
        }
        if (pieces_[i].decays()) {
            value.mul_(1.0 - learning_rate * options_.weight_decay);
        }
        exp_avg_[i].mul_(beta1).add_(grad, 1.0 - beta1);
        exp_avg_sq_[i].mul_(beta2).addcmul_(grad, grad, 1.0 - beta2);
        const at::Tensor denominator = exp_avg_sq_[i].div(correction2).sqrt_().add_(options_.eps);
        value.addcdiv_(exp_avg_[i], denominator, -learning_rate / correction1);
    }
}

double gradient_norm(const std::vector<ParameterPiece>& pieces, Group* shards) {
    const at::NoGradGuard no_grad;
    at::Tensor squares;
    for (const ParameterPiece& piece : pieces) {
        const at::Tensor& grad = piece.value.grad();
        if (!grad.defined() || grad.numel() == 0) {
            continue;
        }
        const at::Tensor square =
            at::linalg_vector_norm(grad, 2, std::nullopt, false, at::kDouble).square_();
        squares = squares.defined() ? squares + square : square;
    }
    if (shards != nullptr && shards->size() > 1) {
        if (!squares.defined()) {
            squares = at::zeros({}, at::TensorOptions(shards->device()).dtype(at::kDouble));
        }
        // Gathered, then added in one order everywhere: replicas must clip by the same bits.
        squares = shards->all_gather("grad_norm", squares.reshape({1})).sum();
    }
    return squares.defined() ? std::sqrt(squares.item<double>()) : 0.0;
}

double clip_gradients(const std::vector<ParameterPiece>& pieces, double max_norm, Group* shards) {
    const at::NoGradGuard no_grad;
    const double norm = gradient_norm(pieces, shards);
    const double scale = max_norm / (norm + 1e-6);
    if (max_norm > 0.0 && scale < 1.0) {
        for (const ParameterPiece& piece : pieces) {
            if (piece.value.grad().defined()) {
                piece.value.grad().mul_(scale);
            }
        }
    }
    return norm;
}

double learning_rate_at(const ScheduleOptions& options, std::int64_t step) {
    const std::int64_t n = step + 1;
    if (n <= options.warmup_steps) {
        return options.learning_rate * static_cast<double>(n) /
               static_cast<double>(options.warmup_steps);
    }
    const double x = std::min(1.0, static_cast<double>(n - options.warmup_steps) /
                                       static_cast<double>(options.steps - options.warmup_steps));
    double factor = 1.0;
    if (options.decay == "cosine") {
        factor = 0.5 * (1.0 + std::cos(std::numbers::pi * x));
    } else if (options.decay == "linear") {
        factor = 1.0 - x;
    }
    return options.learning_rate * (options.min_lr_ratio + (1.0 - options.min_lr_ratio) * factor);
}

}  // namespace hybridcp
