// AdamW, global-norm clipping and the learning-rate schedule, exactly as in the formulas below;
// state is fp32 and elementwise, so that a run of a parameter (parameter_piece.h) is updated as the
// whole would be. A parameter with two or more dims decays (embedding, head and convolution
// included), no other does.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "hybridcp/group.h"
#include "train/parameter_piece.h"

namespace hybridcp {

struct AdamWOptions {
    std::array<double, 2> betas{0.9, 0.95};
    double eps = 1e-8;
    double weight_decay = 0.1;
};

/// For update n = 1, 2, ...: p *= 1 - lr * weight_decay (two dims or more); m = b1 m + (1 - b1) g;
/// v = b2 v + (1 - b2) g^2; p -= lr * (m / (1 - b1^n)) / (sqrt(v / (1 - b2^n)) + eps).
class AdamW {
  public:
    /// Keeps references to the pieces (tensors share storage with the model's).
    AdamW(std::vector<ParameterPiece> pieces, AdamWOptions options);

    /// One update from the pieces' .grad; a piece without one is refused (CheckError).
    void step(double learning_rate);

    [[nodiscard]] std::int64_t num_updates() const { return num_updates_; }
    [[nodiscard]] const std::vector<ParameterPiece>& pieces() const { return pieces_; }
    /// First and second moments, in the order of pieces().
    [[nodiscard]] const std::vector<at::Tensor>& exp_avg() const { return exp_avg_; }
    [[nodiscard]] const std::vector<at::Tensor>& exp_avg_sq() const { return exp_avg_sq_; }
    /// Continues after `num_updates` updates; the moments are written by the caller, in place.
    void set_num_updates(std::int64_t num_updates) { num_updates_ = num_updates; }

  private:
    std::vector<ParameterPiece> pieces_;
    AdamWOptions options_;
    std::vector<at::Tensor> exp_avg_;
    std::vector<at::Tensor> exp_avg_sq_;
    std::int64_t num_updates_ = 0;
};

/// The norm of all gradients together (squares summed in fp64, piece by piece). `shards`: the ranks
/// that hold the other pieces; null where this rank has all. Comm: one all-gather of a number over
/// `shards` (op "grad_norm").
[[nodiscard]] double gradient_norm(const std::vector<ParameterPiece>& pieces,
                                   Group* shards = nullptr);
/// grad *= min(1, max_norm / (norm + 1e-6)); max_norm 0 leaves them as they are. Returns the norm
/// before. Comm: as gradient_norm.
double clip_gradients(const std::vector<ParameterPiece>& pieces,
                      double max_norm,
                      Group* shards = nullptr);

struct ScheduleOptions {
    double learning_rate = 1e-3;
    std::int64_t steps = 100;
    std::int64_t warmup_steps = 10;
    std::string decay = "cosine";  // cosine | linear | constant
    double min_lr_ratio = 0.1;
};

/// The rate of step s = 0, 1, ...: with n = s + 1, lr * n / warmup while n <= warmup; then lr * (r
/// + (1 - r) * f) with x = (n - warmup) / (steps - warmup) and f = (1 + cos(pi x)) / 2 (cosine), 1
/// - x (linear) or 1 (constant).
[[nodiscard]] double learning_rate_at(const ScheduleOptions& options, std::int64_t step);

}  // namespace hybridcp
