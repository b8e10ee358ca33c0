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
            const Mesh& mesh)
        : model_(model), micro_batches_(micro_batches), parallel_(parallel), mesh_(mesh) {
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
        for (const TokenBatch& batch : micro_batches_) {
            const Shard shard = make_shard(batch);
            const ForwardResult forward = model_.forward(shard.token_ids, context(shard));
            const at::Tensor loss_sum =
                cross_entropy_lm_head(forward.hidden, model_.head_weight(), shard.targets).loss_sum;
            const at::Tensor d_probability_sums = balance.add(forward);
            if (backward) {
                run_backward(loss_sum, scale, forward, d_probability_sums);
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
        for (const TokenBatch& batch : micro_batches_) {
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

  private:
    [[nodiscard]] at::Device device() const { return model_.parameters().front().value.device(); }
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
};

std::vector<std::int64_t> lengths_or_full(const std::vector<std::int64_t>& valid_lengths,
                                          std::int64_t num_rows,
                                          std::int64_t row_length) {
    if (valid_lengths.empty()) {
        return std::vector<std::int64_t>(static_cast<std::size_t>(num_rows), row_length);
    }
    HCP_CHECK_EQ(static_cast<std::int64_t>(valid_lengths.size()), num_rows,
                 "one valid length a row");
    for (const std::int64_t length : valid_lengths) {
        HCP_CHECK(length >= 0 && length <= row_length, "valid length {} of a row of {} tokens",
                  length, row_length);
    }
    return valid_lengths;
}
}  // namespace

TokenBatch batch_from_rows(const at::Tensor& token_ids,
                           const at::Tensor& targets,
                           const std::vector<std::int64_t>& valid_lengths) {
    HCP_CHECK_EQ(token_ids.dim(), 2, "dims of token ids, which are [rows, tokens]");
    HCP_CHECK(token_ids.sizes() == targets.sizes(), "targets of another shape than token ids");
    TokenBatch batch;
    batch.document_lengths = lengths_or_full(valid_lengths, token_ids.size(0), token_ids.size(1));
    std::vector<at::Tensor> ids{at::empty({0}, at::kLong)};
    std::vector<at::Tensor> labels{at::empty({0}, at::kLong)};
    for (std::int64_t row = 0; row < token_ids.size(0); ++row) {
        const std::int64_t length = batch.document_lengths[static_cast<std::size_t>(row)];
        ids.push_back(token_ids[row].narrow(0, 0, length).to(at::kLong));
        labels.push_back(targets[row].narrow(0, 0, length).to(at::kLong));
    }
    batch.token_ids = at::cat(ids);
    batch.targets = at::cat(labels);
    return batch;
}

at::Tensor rows_from_flat(const at::Tensor& flat,
                          const std::vector<std::int64_t>& valid_lengths,
                          std::int64_t row_length) {
    const auto num_rows = static_cast<std::int64_t>(valid_lengths.size());
    std::vector<std::int64_t> shape{num_rows, row_length};
    shape.insert(shape.end(), flat.sizes().begin() + 1, flat.sizes().end());
    at::Tensor rows = at::zeros(shape, flat.options());
    std::int64_t offset = 0;
    for (std::int64_t row = 0; row < num_rows; ++row) {
        const std::int64_t length = valid_lengths[static_cast<std::size_t>(row)];
        HCP_CHECK_LE(length, row_length, "valid length of row {}", row);
        rows[row].narrow(0, 0, length).copy_(flat.narrow(0, offset, length));
        offset += length;
    }
    HCP_CHECK_EQ(offset, flat.size(0), "tokens of the flat tensor, from the valid lengths");
    return rows;
}

at::Tensor gather_flat(const at::Tensor& local, const Layout& layout, Group& cp_group) {
    HCP_CHECK_EQ(local.size(0), layout.num_local_tokens(cp_group.rank()), "local tokens");
    std::int64_t padded = 0;
    for (int rank = 0; rank < layout.num_ranks(); ++rank) {
        padded = std::max(padded, layout.num_local_tokens(rank));
    }
    std::vector<std::int64_t> shape = local.sizes().vec();
    shape[0] = padded;
    at::Tensor mine = at::zeros(shape, local.options());
    mine.narrow(0, 0, local.size(0)).copy_(local);
    const at::Tensor all = cp_group.all_gather("gather_flat", mine);  // [P, padded, ...]
    shape[0] = layout.num_tokens();
    at::Tensor flat = at::empty(shape, local.options());
    for (int rank = 0; rank < layout.num_ranks(); ++rank) {
        const at::Tensor indices = at::tensor(layout.flat_indices(rank), at::kLong);
        flat.index_copy_(0, indices.to(local.device()), all[rank].narrow(0, 0, indices.numel()));
    }
    return flat;
}

StepLoss forward_backward(const HybridModel& model,
                          const std::vector<TokenBatch>& micro_batches,
                          const Parallel& parallel,
                          const Mesh& mesh) {
    for (const NamedParameter& parameter : model.parameters()) {
        at::Tensor value = parameter.value;
        value.mutable_grad().reset();
    }
    const StepRun run(model, micro_batches, parallel, mesh);
    run.agree();
    StepLoss result = run.count_labels();
    run.add_losses(result, true);
    if (!std::isfinite(result.loss)) {
        run.fail_on_loss(result.loss);
    }
    all_reduce_gradients(model.parameters(), *mesh.world);
    const std::string wrong = first_non_finite_gradient(model.parameters());
    if (!wrong.empty()) {
        throw NumericsError(fmt::format(
            "the loss is {}, but the gradient of {} is not finite (those of later layers are)",
            result.loss, wrong));
    }
    return result;
}

StepLoss forward_only(const HybridModel& model,
                      const std::vector<TokenBatch>& micro_batches,
                      const Parallel& parallel,
                      const Mesh& mesh) {
    const at::NoGradGuard no_grad;
    const StepRun run(model, micro_batches, parallel, mesh);
    run.agree();
    StepLoss result = run.count_labels();
    run.add_losses(result, false);
    if (!std::isfinite(result.loss)) {
        run.fail_on_loss(result.loss);
    }
    return result;
}

}  // namespace hybridcp
