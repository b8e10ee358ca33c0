#include "train/trainer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <numbers>
#include <ostream>

#include "core/files.h"
#include "core/folder_lock.h"
#include "hybridcp/error.h"
#include "model/layout_schedule.h"
#include "train/checkpoint.h"
#include "train/checkpoint_folders.h"
#include "train/data.h"
#include "train/model_setup.h"
#include "train/progress.h"
#include "train/shared_work.h"
#include "train/trained_model.h"

namespace hybridcp {

namespace {

/// Rows of the validation files that are evaluated: enough for a steady number, few enough to be
/// quick.
constexpr std::int64_t kMaxValidationRows = 64;

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

class Trainer {
  public:
    Trainer(const Recipe& recipe, const Mesh& mesh, const TrainOptions& options)
        : recipe_(recipe), mesh_(mesh), options_(options) {}

    TrainReport run() {
        memory_.emplace();
        set_up();
        while (state_.step < recipe_.train.steps && !stop_is_asked()) {
            const StepMetrics metrics = step();
            if (progress_) {
                progress_->show(metrics);
            }
            if (options_.on_step) {
                options_.on_step(metrics);
            }
            if (recipe_.checkpoint.every > 0 && state_.step % recipe_.checkpoint.every == 0) {
                save();
            }
        }
        report_.stopped_early = state_.step < recipe_.train.steps;
        save();
        draw();
        if (progress_) {
            progress_->finish();
        }
        report_.last_step = state_.step;
        report_.tokens_per_second =
            seconds_ > 0.0 ? static_cast<double>(num_tokens_) / seconds_ : 0;
        return report_;
    }

  private:
    [[nodiscard]] const HybridModel& model() const { return trained_->model(); }
    [[nodiscard]] AdamW& optimizer() { return trained_->optimizer(); }
    [[nodiscard]] bool is_first_rank() const { return mesh_.world->rank() == 0; }
    void note(const std::string& text) const {
        if (is_first_rank() && options_.out != nullptr && !text.empty()) {
            *options_.out << text << '\n' << std::flush;
        }
    }

    void set_up() {
        // Before any exchange: every rank refuses by itself.
        parallel_ =
            make_parallel(recipe_.train.accelerator,
                          recipe_model_config(recipe_.model).head_counts(), recipe_.model.dtype);
        HCP_CHECK_EQ(parallel_.dp * parallel_.cp, mesh_.world->size(), "ranks of the mesh");
        mesh_.world->agree(recipe_hash(recipe_), "the recipe");
        lock_checkpoints();
        std::string skipped;
        on_every_rank(mesh_, "set-up", [&] {
            trained_.emplace(trained_model_options(recipe_, parallel_),
                             *parameter_source(recipe_, &skipped), mesh_);
            const RowLoaderOptions rows{.sequence_length = recipe_.data.sequence_length,
                                        .packing = recipe_.data.packing,
                                        .seed = static_cast<std::uint64_t>(recipe_.train.seed),
                                        .vocab_size = model().config().vocab_size};
            data_.emplace(recipe_.data.path, "data.path", rows);
            if (recipe_.train.eval_every > 0) {
                validation_.emplace(recipe_.data.validation_path, "data.validation_path", rows);
            }
        });
        note(skipped);
        note(describe_layouts(model().config(), parallel_));
        state_ = {.seed = recipe_.train.seed,
                  .data_fingerprint = data_->fingerprint(),
                  .recipe_hash = recipe_hash(recipe_),
                  .topology = describe_topology()};
        note("data: " + state_.data_fingerprint);
        resume();
        report_.first_step = state_.step;
        report_.is_bytes = data_->corpus().is_bytes();
        open_outputs();
    }

    [[nodiscard]] std::string describe_topology() const {
        const ParallelOptions& options = recipe_.train.accelerator;
        return fmt::format("dp {}, cp {}, {}, {}, {} layout, {}", options.dp, options.cp,
                           options.linear_attention_cp_mode, options.full_attention_cp_mode,
                           options.sequence_layout,
                           trained_->shards() == nullptr
                               ? "whole parameters"
                               : fmt::format("parameters over {}", mesh_.shards->size()));
    }

    void open_outputs() {
        on_rank_zero(mesh_, "open the run's files", [&] {
            if (recipe_.log.dir) {
                metrics_.emplace(*recipe_.log.dir, state_.step);
                report_.metrics_path = metrics_->path();
            }
            if (options_.out != nullptr) {
                progress_.emplace(*options_.out,
                                  ProgressOptions{.first_step = state_.step,
                                                  .total_steps = recipe_.train.steps,
                                                  .every = recipe_.log.every,
                                                  .is_terminal = options_.is_terminal});
            }
        });
    }

    /// Before the work of set-up: no other run may write here.
    void lock_checkpoints() {
        if (!recipe_.checkpoint.dir) {
            return;
        }
        const std::string& dir = *recipe_.checkpoint.dir;
        on_rank_zero(mesh_, "lock checkpoint.dir", [&] {
            with_files("create checkpoint.dir " + dir,
                       [&] { std::filesystem::create_directories(dir); });
            lock_.emplace(dir, "run.lock");
        });
        check_shared_folder(mesh_, dir);
    }

    void resume() {
        if (!recipe_.checkpoint.dir) {
            return;
        }
        const std::optional<std::string> folder = choose_checkpoint();
        if (!folder) {
            return;
        }
        TrainState saved;
        on_every_rank(mesh_, "read the checkpoint",
                      [&] { saved = load_checkpoint(*folder, model().config(), optimizer()); });
        note(fmt::format("resuming from {} at step {} ({})", *folder, saved.step, saved.topology));
        if (saved.data_fingerprint != state_.data_fingerprint) {
            note(fmt::format("the data have changed since ({}): the order of rows is another one",
                             saved.data_fingerprint));
        }
        if (saved.recipe_hash != state_.recipe_hash) {
            note("the recipe has changed since");
        }
        leave_checkpoints_after(saved.step);
        state_.step = saved.step;
        state_.consumed_rows = saved.consumed_rows;
        report_.checkpoint_folder = *folder;
    }

    /// The same on every rank; nothing when the run starts anew.
    [[nodiscard]] std::optional<std::string> choose_checkpoint() const {
        const std::string& dir = *recipe_.checkpoint.dir;
        const std::string& choice = recipe_.checkpoint.resume;
        on_rank_zero(mesh_, "tidy checkpoint.dir", [&] { tidy_checkpoints(dir); });
        if (choice == "never") {
            leave_checkpoints_after(-1);
            return std::nullopt;
        }
        if (choice == "auto") {
            std::int64_t num_skipped = 0;
            auto folder = shared_latest_checkpoint(mesh_, dir, [&](const std::string& reason) {
                note("skipped a checkpoint: " + reason);
                ++num_skipped;
            });
            if (!folder && num_skipped > 0) {
                throw FormatError(fmt::format(
                    "{}: none of its checkpoints can be loaded: mend one, or start anew with "
                    "checkpoint.resume: never",
                    dir));
            }
            return folder;
        }
        if (const auto damage = shared_checkpoint_damage(mesh_, choice)) {
            throw FormatError("checkpoint.resume: " + *damage);
        }
        return choice;
    }

    /// What is saved after the step from which this run goes on is not its future: it is damaged,
    /// or another run's.
    void leave_checkpoints_after(std::int64_t step) const {
        const std::string& dir = *recipe_.checkpoint.dir;
        on_rank_zero(mesh_, "rename older checkpoints", [&] {
            const std::int64_t count = set_checkpoints_aside(dir, step);
            note(count == 0 ? ""
                            : fmt::format("{} other checkpoint{} in {} renamed to replaced-step-*",
                                          count, count == 1 ? "" : "s", dir));
        });
    }

    [[nodiscard]] bool stop_is_asked() const {
        at::Tensor asked =
            at::tensor({options_.stop != nullptr && options_.stop->load() ? std::int64_t{1}
                                                                          : std::int64_t{0}},
                       at::kLong)
                .to(mesh_.device);
        if (mesh_.world->size() > 1) {
            mesh_.world->all_reduce_max("stop", asked);
        }
        return asked.item<std::int64_t>() != 0;
    }

    /// This dp rank's micro-batches of the next global batch. All ranks' m-th ones are consecutive
    /// rows, so that dp ranks see what one rank with dp times the micro-batch size sees.
    [[nodiscard]] std::vector<TokenBatch> next_batches() const {
        const std::int64_t size = recipe_.train.micro_batch_size;
        std::vector<Row> rows;
        for (std::int64_t first = mesh_.dp->rank() * size; first < recipe_.train.global_batch_size;
             first += parallel_.dp * size) {
            for (std::int64_t i = 0; i < size; ++i) {
                rows.push_back(data_->sample(state_.consumed_rows + first + i));
            }
        }
        return make_batches(rows, size);
    }

    StepMetrics step() {
        const std::int64_t number = state_.step + 1;
        mesh_.set_step(number);
        mesh_.reset_recorders();
        try {
            if (memory_) {
                memory_->reset_peaks();
            }
            StepMetrics metrics = update(number);
            if (memory_) {  // one step tells: the others do the same
                metrics.tensors = largest_memory(memory_->record(), *mesh_.world);
                memory_.reset();
                note(to_table(*metrics.tensors));
            }
            if (recipe_.train.eval_every > 0 && number % recipe_.train.eval_every == 0) {
                metrics.validation_loss = report_.validation_loss = validate();
            }
            on_rank_zero(mesh_, "write the metrics", [&] {
                if (metrics_) {
                    metrics_->write(metrics);
                }
            });
            return metrics;
        } catch (const NumericsError& error) {
            throw NumericsError(fmt::format("step {}: {}", number, error.what()), error.where());
        }
    }

    StepMetrics update(std::int64_t number) {
        const Clock::time_point start = Clock::now();
        StepMetrics metrics{.step = number, .num_ranks = mesh_.world->size()};
        const std::vector<TokenBatch> batches = next_batches();
        metrics.data_seconds = seconds_since(start);
        const StepLoss loss = trained_->forward_backward(batches, parallel_);
        metrics.forward_backward_seconds = seconds_since(start) - metrics.data_seconds;
        const auto& optimizer = recipe_.train.optimizer;
        const auto& schedule = recipe_.train.schedule;
        metrics.learning_rate = learning_rate_at({.learning_rate = optimizer.lr,
                                                  .steps = recipe_.train.steps,
                                                  .warmup_steps = schedule.warmup_steps,
                                                  .decay = schedule.decay,
                                                  .min_lr_ratio = schedule.min_lr_ratio},
                                                 state_.step);
        metrics.grad_norm = trained_->update(metrics.learning_rate, recipe_.train.grad_clip);
        metrics.step_seconds = seconds_since(start);
        metrics.optimizer_seconds =
            metrics.step_seconds - metrics.data_seconds - metrics.forward_backward_seconds;
        metrics.loss = loss.loss;
        metrics.aux_loss = loss.aux_loss;
        metrics.ce_loss = loss.aux_loss ? std::optional(loss.ce_loss) : std::nullopt;
        metrics.num_labels = loss.num_labels;
        metrics.num_tokens = loss.num_tokens;
        metrics.traffic = mesh_.traffic();
        metrics.forgetting_heads = mesh_.cp->recorder().share("gdn_forgetting_heads");
        if (report_.is_bytes) {
            metrics.bits_per_byte = loss.ce_loss / std::numbers::ln2;
        }
        report_.first_loss = state_.step == report_.first_step ? loss.ce_loss : report_.first_loss;
        report_.last_loss = loss.ce_loss;
        state_.step = number;
        state_.consumed_rows += recipe_.train.global_batch_size;
        num_tokens_ += loss.num_tokens;
        seconds_ += metrics.step_seconds;
        return metrics;
    }

    [[nodiscard]] double validate() {
        const std::int64_t num_rows = std::min(validation_->num_rows(), kMaxValidationRows);
        std::vector<Row> rows;
        for (std::int64_t i = mesh_.dp->rank(); i < num_rows; i += parallel_.dp) {
            rows.push_back(validation_->sample(i));
        }
        const auto batches = make_batches(rows, recipe_.train.micro_batch_size);
        return trained_->forward_only(batches, parallel_).ce_loss;
    }

    void save() {
        if (!recipe_.checkpoint.dir || state_.step == saved_step_ ||
            state_.step == report_.first_step) {
            return;
        }
        const std::string& dir = *recipe_.checkpoint.dir;
        report_.checkpoint_folder =
            save_checkpoint(dir, mesh_, model().config(), optimizer(), state_);
        on_rank_zero(mesh_, "delete older checkpoints",
                     [&] { prune_checkpoints(dir, state_.step, recipe_.checkpoint.keep); });
        saved_step_ = state_.step;
        draw();
    }

    void draw() {
        on_rank_zero(mesh_, "draw the loss curve", [&] {
            if (metrics_) {
                report_.picture_path =
                    (std::filesystem::path(*recipe_.log.dir) / "loss.svg").string();
                write_file_atomically(report_.picture_path,
                                      loss_curve_svg(metrics_->curve(), *recipe_.log.dir));
            }
        });
    }

    const Recipe& recipe_;
    const Mesh& mesh_;
    const TrainOptions& options_;
    Parallel parallel_;
    std::optional<FolderLock> lock_;  // of checkpoint.dir, on rank 0
    std::optional<TrainedModel> trained_;
    std::optional<RowLoader> data_;
    std::optional<RowLoader> validation_;
    std::optional<MetricsFile> metrics_;  // on rank 0
    std::optional<Progress> progress_;    // on rank 0
    std::optional<TensorMemory> memory_;  // until the first step is done
    TrainState state_;
    TrainReport report_;
    std::int64_t saved_step_ = -1;
    std::int64_t num_tokens_ = 0;
    double seconds_ = 0.0;
};
}  // namespace

TrainReport run_training(const Recipe& recipe, const Mesh& mesh, const TrainOptions& options) {
    return Trainer(recipe, mesh, options).run();
}

}  // namespace hybridcp
