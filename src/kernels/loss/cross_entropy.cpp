#include "kernels/loss/cross_entropy.h"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "core/memory_class.h"
#include "hybridcp/error.h"
#include "kernels/linear/linear.h"
#include "kernels/loss/fused_loss.h"
#include "kernels/pointwise/pointwise.h"

namespace hybridcp {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Refuses targets that are neither ignored nor in the vocabulary (one host synchronisation).
void check_targets(const at::Tensor& targets, std::int64_t num_rows, std::int64_t vocabulary) {
    HCP_CHECK(
        targets.dim() == 1 && targets.size(0) == num_rows && targets.scalar_type() == at::kLong,
        "cross_entropy: targets must be int64 [T] with T = {}, got {} [{}]", num_rows,
        at::toString(targets.scalar_type()), fmt::join(targets.sizes(), ", "));
    const at::Tensor wrong =
        targets.ne(kIgnoredTarget).logical_and_(targets.lt(0).logical_or_(targets.ge(vocabulary)));
    if (wrong.any().item<bool>()) {
        const std::int64_t row = wrong.nonzero()[0].item<std::int64_t>();
        throw UsageError(fmt::format(
            "cross_entropy: target {} in row {} is outside the vocabulary of {} "
            "(0 to {}, or {} for ignored)",
            targets[row].item<std::int64_t>(), row, vocabulary, vocabulary - 1, kIgnoredTarget));
    }
}

/// Loss of each row, 0 where ignored; `logits` [R, V] (fp32 or fp64) is overwritten by exp(logits -
/// max). What a gradient needs besides, the sums of its rows, goes to `row_sums` [R, 1].
at::Tensor loss_of_rows(at::Tensor& logits, const at::Tensor& targets, at::Tensor& row_sums) {
    const at::Tensor ignored = targets.eq(kIgnoredTarget);
    const at::Tensor column = targets.clamp_min(0).unsqueeze(1);  // [R, 1]
    logits.sub_(logits.amax(1, true));
    const at::Tensor target_logit = logits.gather(1, column);
    row_sums = logits.exp_().sum(1, true);
    return row_sums.log().sub_(target_logit).squeeze(1).masked_fill_(ignored, 0);
}

/// Turns what loss_of_rows left into the gradient of the sum of losses with respect to the logits.
void gradient_of_rows(at::Tensor& exponentials,
                      const at::Tensor& targets,
                      const at::Tensor& row_sums) {
    const at::Tensor valid = targets.ne(kIgnoredTarget).unsqueeze(1).to(exponentials.scalar_type());
    exponentials.mul_(valid / row_sums);
    exponentials.scatter_add_(1, targets.clamp_min(0).unsqueeze(1), valid.neg());
}

/// The passes over the chunks; `d_hidden` and `d_weight` are filled where they are defined.
class ChunkedLoss {
  public:
    ChunkedLoss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets)
        : hidden_(hidden), weight_(weight.to(hidden.scalar_type())), targets_(targets) {}

    at::Tensor d_hidden;  // [T, d] in hidden's dtype
    at::Tensor d_weight;  // [V, d] fp32

    [[nodiscard]] at::Tensor run(std::int64_t rows_per_chunk) {
        const std::int64_t num_rows = hidden_.size(0);
        const at::ScalarType dtype = at::toOpMathType(hidden_.scalar_type());
        const std::int64_t chunk_rows = std::min(rows_per_chunk, num_rows);
        at::Tensor loss = at::zeros({num_rows}, hidden_.options().dtype(dtype));
        // One buffer of logits for all chunks, and for bf16 without fused kernels one in fp32.
        at::Tensor product = at::empty({chunk_rows, weight_.size(0)}, hidden_.options());
        at::Tensor wide = product.scalar_type() == dtype || takes_fused({product})
                              ? product
                              : at::empty_like(product, dtype);
        for (std::int64_t begin = 0; begin < num_rows; begin += chunk_rows) {
            const std::int64_t rows = std::min(chunk_rows, num_rows - begin);
            at::Tensor product_rows = product.narrow(0, 0, rows);
            at::Tensor wide_rows = wide.narrow(0, 0, rows);
            loss.narrow(0, begin, rows).copy_(run_chunk(begin, product_rows, wide_rows));
        }
        return loss;
    }

  private:
    at::Tensor run_chunk(std::int64_t begin, at::Tensor& product, at::Tensor& wide) {
        const std::int64_t rows = product.size(0);
        const at::Tensor hidden = hidden_.narrow(0, begin, rows);
        at::mm_out(product, hidden, weight_.t());
        at::Tensor loss = to_gradient(product, wide, targets_.narrow(0, begin, rows));
        if (d_hidden.defined()) {
            at::Tensor d_rows = d_hidden.narrow(0, begin, rows);
            at::mm_out(d_rows, product, weight_);
        }
        if (d_weight.defined() && product.scalar_type() != d_weight.scalar_type()) {
            add_weight_gradient(product, hidden);
        } else if (d_weight.defined()) {
            d_weight.addmm_(product.t(), hidden);
        }
        return loss;
    }

    /// Some words at a time: what is widened for a product in fp32 is not as large as all logits,
    /// nor the product as d_weight.
    void add_weight_gradient(const at::Tensor& product, const at::Tensor& hidden) {
        constexpr std::int64_t kWords = 8192;
        const at::Tensor wide_hidden =
            hidden.is_cuda() ? hidden : hidden.to(d_weight.scalar_type());
        for (std::int64_t begin = 0; begin < d_weight.size(0); begin += kWords) {
            const std::int64_t words = std::min(kWords, d_weight.size(0) - begin);
            const at::Tensor d_words = d_weight.narrow(0, begin, words);
            const at::Tensor logits = product.narrow(1, begin, words);
            if (hidden.is_cuda()) {
                d_words.add_(weight_gradient(logits, hidden));
            } else {
                d_words.addmm_(logits.to(d_weight.scalar_type()).t(), wide_hidden);
            }
        }
    }

    /// The losses of the logits in `product`; these become their gradient where one is wanted.
    /// `wide` is the same memory or a buffer in fp32.
    at::Tensor to_gradient(at::Tensor& product, at::Tensor& wide, const at::Tensor& targets) const {
        const bool with_gradient = d_hidden.defined() || d_weight.defined();
        if (takes_fused({product})) {
            return with_gradient ? fused_losses_to_gradients(product, targets)
                                 : fused_row_losses(product, targets).loss;
        }
        const bool separate = product.scalar_type() != wide.scalar_type();
        if (separate) {
            wide.copy_(product);
        }
        at::Tensor row_sums;
        at::Tensor loss = loss_of_rows(wide, targets, row_sums);
        if (with_gradient) {
            gradient_of_rows(wide, targets, row_sums);
            if (separate) {
                product.copy_(wide);
            }
        }
        return loss;
    }

    at::Tensor hidden_;
    at::Tensor weight_;
    at::Tensor targets_;
};

/// Not saved as variables, which could not be scaled in place: a copy of d_weight is as large as
/// the head.
struct LossGradients : torch::CustomClassHolder {
    LossGradients(at::Tensor of_hidden, at::Tensor of_weight)
        : d_hidden(std::move(of_hidden)), d_weight(std::move(of_weight)) {}
    at::Tensor d_hidden, d_weight;  // of the sum of losses; undefined where not wanted
    bool are_taken = false;
};

struct LmHeadLoss : torch::autograd::Function<LmHeadLoss> {
    static variable_list forward(AutogradContext* context,
                                 const at::Tensor& hidden,
                                 const at::Tensor& weight,
                                 const at::Tensor& targets,
                                 std::int64_t rows_per_chunk,
                                 bool with_gradients) {
        const MemoryScope scope(MemoryClass::kLogits);
        ChunkedLoss chunks(hidden, weight, targets);
        if (with_gradients && hidden.requires_grad()) {
            chunks.d_hidden = at::empty(hidden.sizes(), hidden.options());
        }
        if (with_gradients && weight.requires_grad()) {
            const at::ScalarType dtype = at::toOpMathType(weight.scalar_type());
            const MemoryScope gradient_scope(MemoryClass::kGradients);
            chunks.d_weight = at::zeros(weight.sizes(), weight.options().dtype(dtype));
        }
        const at::Tensor loss_per_token = chunks.run(rows_per_chunk);
        context->saved_data["gradients"] =
            c10::IValue::make_capsule(c10::make_intrusive<LossGradients>(
                std::move(chunks.d_hidden), std::move(chunks.d_weight)));
        context->mark_non_differentiable({loss_per_token});
        return {loss_per_token.sum(), loss_per_token};
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const auto holder = context->saved_data["gradients"].toCapsule();
        auto& saved = static_cast<LossGradients&>(*holder);
        HCP_CHECK(!std::exchange(saved.are_taken, true),
                  "cross_entropy_lm_head: backward can run only once, it scales its gradients in "
                  "place");
        const auto scaled = [&](at::Tensor gradient) {
            return gradient.defined() ? gradient.mul_(gradients[0]) : gradient;
        };
        return {scaled(std::exchange(saved.d_hidden, at::Tensor())),
                scaled(std::exchange(saved.d_weight, at::Tensor())), at::Tensor(), at::Tensor(),
                at::Tensor()};
    }
};

struct LogitsLoss : torch::autograd::Function<LogitsLoss> {
    static variable_list forward(AutogradContext* context,
                                 const at::Tensor& logits,
                                 const at::Tensor& targets) {
        at::Tensor wide = logits.to(at::toOpMathType(logits.scalar_type()), false, true);
        at::Tensor row_sums;
        const at::Tensor loss_per_token = loss_of_rows(wide, targets, row_sums);
        gradient_of_rows(wide, targets, row_sums);
        context->save_for_backward({wide});
        context->saved_data["dtype"] = logits.scalar_type();
        context->mark_non_differentiable({loss_per_token});
        return {loss_per_token.sum(), loss_per_token};
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const at::Tensor d_logits = context->get_saved_variables()[0];
        const at::ScalarType dtype = context->saved_data["dtype"].toScalarType();
        return {d_logits.mul(gradients[0]).to(dtype), at::Tensor()};
    }
};

struct FusedLogitsLoss : torch::autograd::Function<FusedLogitsLoss> {
    static variable_list forward(AutogradContext* context,
                                 const at::Tensor& logits,
                                 const at::Tensor& targets) {
        const RowLosses rows = fused_row_losses(logits, targets);
        context->save_for_backward({logits, targets, rows.statistics});
        context->mark_non_differentiable({rows.loss});
        return {rows.loss.sum(), rows.loss};
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        const variable_list saved = context->get_saved_variables();
        return {fused_row_gradients(saved[0], saved[1], saved[2], gradients[0]), at::Tensor()};
    }
};

}  // namespace

CrossEntropy cross_entropy_lm_head(const at::Tensor& hidden,
                                   const at::Tensor& weight,
                                   const at::Tensor& targets,
                                   std::int64_t rows_per_chunk) {
    HCP_CHECK(
        hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1) &&
            (weight.scalar_type() == hidden.scalar_type() ||
             weight.scalar_type() == at::toOpMathType(hidden.scalar_type())) &&
            weight.size(0) > 0,
        "cross_entropy_lm_head: hidden must be [T, d] and weight [vocabulary, d] of its dtype "
        "or fp32, got {} {} "
        "and {} {}",
        at::toString(hidden.scalar_type()), fmt::join(hidden.sizes(), "x"),
        at::toString(weight.scalar_type()), fmt::join(weight.sizes(), "x"));
    HCP_CHECK_GE(rows_per_chunk, 1, "cross_entropy_lm_head: rows_per_chunk");
    check_targets(targets, hidden.size(0), weight.size(0));
    const variable_list results =
        LmHeadLoss::apply(hidden, weight, targets, rows_per_chunk, at::GradMode::is_enabled());
    return {results[0], results[1]};
}

CrossEntropy cross_entropy_logits(const at::Tensor& logits, const at::Tensor& targets) {
    HCP_CHECK(logits.dim() == 2 && logits.size(1) > 0,
              "cross_entropy_logits: logits must be [T, vocabulary], got {}",
              fmt::join(logits.sizes(), "x"));
    check_targets(targets, logits.size(0), logits.size(1));
    const variable_list results = takes_fused({logits}) ? FusedLogitsLoss::apply(logits, targets)
                                                        : LogitsLoss::apply(logits, targets);
    return {results[0], results[1]};
}

}  // namespace hybridcp
