#include "train/step.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "hybridcp/error.h"
#include "kernels/loss/cross_entropy.h"
#include "ops/batch_plan.h"
#include "ops/context_parallel.h"
#include "train/gradient_reduction.h"
#include "train/router_balance.h"

namespace hybridcp {

namespace {

/// One micro-batch as this rank sees it.
struct Shard {
    BatchPlan plan;
    at::Tensor token_ids = {};  // [T_local]
    at::Tensor targets = {};    // [T_local]
};

class HashBuilder {
  public:
    void add(std::uint64_t word) {
        state_ = (state_ ^ word) * 0x100000001b3ULL;
        state_ ^= state_ >> 29;
    }
    void add(const at::Tensor& tokens) {
        const at::Tensor host = tokens.to(at::kCPU).contiguous();
        const std::int64_t* values = host.const_data_ptr<std::int64_t>();
        for (std::int64_t i = 0; i < host.numel(); ++i) {
            add(static_cast<std::uint64_t>(values[i]));
        }
    }
    [[nodiscard]] std::uint64_t value() const { return state_; }

  private:
    std::uint64_t state_ = 0xcbf29ce484222325ULL;
};

void check_batch(const TokenBatch& batch) {
    std::int64_t num_tokens = 0;
    for (const std::int64_t length : batch.document_lengths) {
        num_tokens += length;
    }
    HCP_CHECK_EQ(batch.token_ids.numel(), num_tokens,
                 "tokens of a batch, from its document lengths");
    HCP_CHECK_EQ(batch.targets.numel(), num_tokens,
                 "targets of a batch, from its document lengths");
}

/// Forward (and backward) of the micro-batches of one step on one rank.
class StepRun {
  public:
    StepRun(const HybridModel& model,
            const std::vector<TokenBatch>& micro_batches,
            const Parallel& parallel,
            const Mesh& mesh,
            ShardedParameters* shards)
        : model_(model),
          micro_batches_(micro_batches),
          parallel_(parallel),
          mesh_(mesh),
          shards_(shards) {
        for (const TokenBatch& batch : micro_batches) {
            check_batch(batch);
        }
    }

    /// Ranks of one sequence must hold the same batch, layout and choices before they exchange
    /// anything.
    void agree() const {
        HashBuilder hash;
        hash.add(static_cast<std::uint64_t>(parallel_.linear_attention_mode));
        hash.add(static_cast<std::uint64_t>(parallel_.full_attention_mode));
        hash.add(static_cast<std::uint64_t>(parallel_.linear_layout_kind));
        hash.add(static_cast<std::uint64_t>(parallel_.elide_conversions));
        hash.add(static_cast<std::uint64_t>(parallel_.exact_summaries));
        hash.add(static_cast<std::uint64_t>(model_.compute_dtype()));
        hash.add(static_cast<std::uint64_t>(model_.gdn_chunk_size));
        hash.add(static_cast<std::uint64_t>(model_.activation_checkpoint));
        hash.add(micro_batches_.size());
        for (const TokenBatch& batch : micro_batches_) {
            hash.add(stream_layout(batch.document_lengths, parallel_).hash());
            hash.add(batch.token_ids);
            hash.add(batch.targets);
        }
        mesh_.cp->agree(hash.value(), "the step's batch and its layout");
    }

    /// Comm: one all-reduce of two integers over dp (the ranks of one sequence hold the same
    /// batch).
    [[nodiscard]] StepLoss count_labels() const {
        std::int64_t num_labels = 0;
        std::int64_t num_tokens = 0;
        for (const TokenBatch& batch : micro_batches_) {
            num_labels += batch.targets.ne(kIgnoredTarget).sum().item<std::int64_t>();
            num_tokens += batch.targets.numel();
        }
        at::Tensor counts = at::tensor({num_labels, num_tokens}, at::kLong).to(device());
        if (mesh_.dp->size() > 1) {
            mesh_.dp->all_reduce_sum("label_count", counts);
        }
        return {.num_labels = counts[0].item<std::int64_t>(),
                .num_tokens = counts[1].item<std::int64_t>()};
    }

    [[nodiscard]] Shard make_shard(const TokenBatch& batch) const {
        const int width = static_cast<int>(model_.config().linear_conv_kernel_dim);
        Shard shard{.plan = make_batch_plan({.document_lengths = batch.document_lengths,
                                             .parallel = parallel_,
                                             .rank = mesh_.cp->rank(),
                                             .conv_width = width,
                                             .device = device()})};
        const at::Tensor indices = shard.plan.flat_indices.to(batch.token_ids.device());
        shard.token_ids = batch.token_ids.index_select(0, indices).to(device());
        shard.targets = batch.targets.index_select(0, indices).to(device());
        return shard;
    }

    [[nodiscard]] CpContext context(const Shard& shard) const {
        return {.group = mesh_.cp.get(), .plan = &shard.plan, .parallel = parallel_};
    }

    /// Fills in the global losses of `result`, which has the label count. With `backward`,
    /// gradients of this rank's part are left in the parameters.
    void add_losses(StepLoss& result, bool backward) const {
        const double scale =
            result.num_labels > 0 ? 1.0 / static_cast<double>(result.num_labels) : 0.0;
        at::Tensor total = at::zeros({}, at::TensorOptions(device()).dtype(at::kDouble));
        RouterBalance balance(model_, static_cast<std::int64_t>(micro_batches_.size()),
                              *mesh_.world);
        for (const TokenBatch& batch : padded_micro_batches()) {
            const Shard shard = make_shard(batch);
            const ForwardResult forward = model_.forward(shard.token_ids, context(shard));
            const at::Tensor loss_sum =
                cross_entropy_lm_head(forward.hidden, model_.head_weight(), shard.targets).loss_sum;
            const at::Tensor d_probability_sums = balance.add(forward);
            if (backward) {
                run_backward(loss_sum, scale, forward, d_probability_sums);
                if (shards_ != nullptr) {
                    shards_->finish_backward();
                }
            }
            total += loss_sum.detach().to(at::kDouble);
        }
        result.aux_loss = balance.finish();
        if (mesh_.world->size() > 1) {
            mesh_.world->all_reduce_sum("loss", total);
        }
        result.ce_loss = total.item<double>() * scale;
        result.loss =
            result.ce_loss + model_.config().router_aux_loss_coef * result.aux_loss.value_or(0.0);
    }

    /// Throws, on every rank alike, the NumericsError of a loss that is not finite.
    [[noreturn]] void fail_on_loss(double loss) const {
        const std::int64_t num_layers = model_.config().num_layers();
        std::int64_t first = num_layers + 1;
        const at::NoGradGuard no_grad;
        for (const TokenBatch& batch : padded_micro_batches()) {
            const Shard shard = make_shard(batch);
            const ForwardResult result = model_.forward(shard.token_ids, context(shard), true);
            first = std::min(first, first_non_finite_layer(result).value_or(first));
            if (!is_finite(result.hidden)) {
                first = std::min(first, num_layers);
            }
        }
        at::Tensor negated = at::tensor({-first}, at::kLong).to(device());
        mesh_.world->all_reduce_max("non_finite_layer", negated);
        first = -negated.item<std::int64_t>();
        throw NumericsError(fmt::format(
            "the loss is {}: {}; a lower train.optimizer.lr or a longer warm-up often helps", loss,
            describe_layer(first)));
    }

    /// Throws, on every rank alike, the NumericsError of a gradient that is not finite.
    void check_gradients(double loss) const {
        const std::string name = first_non_finite_gradient(
            shards_ != nullptr ? shards_->pieces() : whole_pieces(model_.parameters()));
        const auto& parameters = model_.parameters();
        const auto found =
            std::find_if(parameters.begin(), parameters.end(),
                         [&](const NamedParameter& parameter) { return parameter.name == name; });
        // Later layers come first in the backward pass.
        at::Tensor index = at::tensor(
            {found == parameters.end() ? std::int64_t{-1} : found - parameters.begin()}, at::kLong);
        index = index.to(device());
        if (shards_ != nullptr) {
            mesh_.world->all_reduce_max("non_finite_gradient", index);
        }
        const std::int64_t worst = index.item<std::int64_t>();
        if (worst >= 0) {
            throw NumericsError(fmt::format(
                "the loss is {}, but the gradient of {} is not finite (those of later layers are)",
                loss, parameters[static_cast<std::size_t>(worst)].name));
        }
    }

  private:
    [[nodiscard]] at::Device device() const { return mesh_.device; }
    /// Sharded parameters are gathered by all ranks together, so that all run as many passes.
    [[nodiscard]] std::vector<TokenBatch> padded_micro_batches() const {
        std::vector<TokenBatch> batches = micro_batches_;
        if (shards_ == nullptr || mesh_.world->size() == 1) {
            return batches;
        }
        at::Tensor count =
            at::tensor({static_cast<std::int64_t>(batches.size())}, at::kLong).to(device());
        mesh_.world->all_reduce_max("num_micro_batches", count);
        const at::Tensor nothing = at::empty({0}, at::kLong);
        batches.resize(static_cast<std::size_t>(count.item<std::int64_t>()),
                       {.document_lengths = {0}, .token_ids = nothing, .targets = nothing});
        return batches;
    }
    static bool is_finite(const at::Tensor& tensor) {
        return tensor.numel() == 0 || std::isfinite(tensor.abs().max().item<float>());
    }
    [[nodiscard]] std::string describe_layer(std::int64_t layer) const {
        const auto& types = model_.config().layer_types;
        if (layer < model_.config().num_layers()) {
            const bool linear =
                types[static_cast<std::size_t>(layer)] == LayerType::kLinearAttention;
            return fmt::format("the output of layer {} ({}) is the first that is not finite", layer,
                               linear ? "linear attention" : "full attention");
        }
        return layer == model_.config().num_layers()
                   ? "all layers are finite, the output of the final norm is not"
                   : "all layers and the final norm are finite, the logits or their loss are not";
    }

    const HybridModel& model_;
    const std::vector<TokenBatch>& micro_batches_;
    const Parallel& parallel_;
    const Mesh& mesh_;
    ShardedParameters* shards_;  // null: every rank has whole parameters
};

}  // namespace

StepLoss forward_backward(const HybridModel& model,
                          const std::vector<TokenBatch>& micro_batches,
                          const Parallel& parallel,
                          const Mesh& mesh,
                          ShardedParameters* shards) {
    for (const NamedParameter& parameter : model.parameters()) {
        at::Tensor value = parameter.value;
        value.mutable_grad().reset();
    }
    if (shards != nullptr) {
        shards->start_step();
    }
    const StepRun run(model, micro_batches, parallel, mesh, shards);
    run.agree();
    StepLoss result = run.count_labels();
    run.add_losses(result, true);
    if (!std::isfinite(result.loss)) {
        run.fail_on_loss(result.loss);
    }
    if (shards != nullptr) {
        shards->finish_step();
    } else {
        all_reduce_gradients(model.parameters(), *mesh.world);
    }
    run.check_gradients(result.loss);
    return result;
}

StepLoss forward_only(const HybridModel& model,
                      const std::vector<TokenBatch>& micro_batches,
                      const Parallel& parallel,
                      const Mesh& mesh,
                      ShardedParameters* shards) {
    const at::NoGradGuard no_grad;
    const StepRun run(model, micro_batches, parallel, mesh, shards);
    run.agree();
    StepLoss result = run.count_labels();
    run.add_losses(result, false);
    if (!std::isfinite(result.loss)) {
        run.fail_on_loss(result.loss);
    }
    if (shards != nullptr) {
        shards->release();
    }
    return result;
}

}  // namespace hybridcp
