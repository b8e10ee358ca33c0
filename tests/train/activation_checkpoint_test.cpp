// Training with activation checkpointing: the same bits as without it, in every mode, layout,
// backend, dtype and number of ranks; and no exchange but those of ulysses and gather_hidden in the
// second forward pass.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>

#include "hybridcp/parameter_residency.h"
#include "kernels/loss/cross_entropy.h"
#include "mesh_threads.h"
#include "ops/batch_plan.h"
#include "ops/context_parallel.h"
#include "train/optimizer.h"
#include "train/step.h"

namespace hybridcp {
namespace {

using testing::run_mesh;
using Traffic = std::map<std::string, OpTraffic>;

constexpr std::array kCheckpoints{ActivationCheckpoint::kNone, ActivationCheckpoint::kFull,
                                  ActivationCheckpoint::kSelective};

/// Packed documents, some empty or of one token.
TokenBatch packed_batch(std::int64_t seed) {
    TokenBatch batch;
    batch.document_lengths = {31 + seed, 0, 1, 2, 40, 7};
    std::int64_t tokens = 0;
    for (const std::int64_t length : batch.document_lengths) {
        tokens += length;
    }
    const at::Tensor index = at::arange(tokens, at::kLong);
    batch.token_ids = (index * index * 7 + index * 31 + seed * 131) % 512;
    batch.targets = (index * index * 5 + index * 17 + seed * 37) % 512;
    batch.targets[3] = kIgnoredTarget;
    return batch;
}

struct Training {
    std::string model;  // of the golden ones
    at::ScalarType dtype = at::kFloat;
    Parallel parallel;
    int steps = 2;
};

HybridModel load_model(const Training& run) {
    const std::string folder = std::string(HCP_GOLDEN_DIR) + "/models/" + run.model;
    ModelConfig config = read_model_config(folder);
    if (config.has_experts()) {
        config.router_aux_loss_coef = 0.1;
    }
    return HybridModel(config, load_parameters(folder, config, at::kCPU), run.dtype);
}

struct Outcome {
    std::vector<double> losses, gradient_norms;
    std::vector<at::Tensor> parameters;
    Traffic traffic;
};

Outcome train(const Training& run, ActivationCheckpoint checkpoint, const Mesh& mesh) {
    HybridModel model = load_model(run);
    model.activation_checkpoint = checkpoint;
    AdamW optimizer(whole_pieces(model.parameters()), {});
    mesh.reset_recorders();
    Outcome outcome;
    for (int step = 0; step < run.steps; ++step) {
        const StepLoss loss = forward_backward(model, {packed_batch(step)}, run.parallel, mesh);
        outcome.losses.push_back(loss.loss);
        outcome.gradient_norms.push_back(clip_gradients(optimizer.pieces(), 1.0));
        optimizer.step(3e-3);
    }
    for (const NamedParameter& parameter : model.parameters()) {
        outcome.parameters.push_back(parameter.value.detach());
    }
    outcome.traffic = mesh.traffic();
    return outcome;
}

void expect_same_bits(const Outcome& a, const Outcome& b) {
    EXPECT_EQ(a.losses, b.losses);
    EXPECT_EQ(a.gradient_norms, b.gradient_norms);
    for (std::size_t i = 0; i < a.parameters.size(); ++i) {
        EXPECT_TRUE(at::equal(a.parameters[i], b.parameters[i])) << "parameter " << i;
    }
}

/// `full`: ulysses sends its forward part, half of it, once more; gather_hidden its all-gather.
void expect_traffic(const Traffic& with, const Traffic& without, bool full) {
    EXPECT_EQ(with.size(), without.size());
    for (const auto& [op, traffic] : without) {
        const bool repeats =
            full && (op == "gather_hidden" || op == "gdn_ulysses" || op == "attention_ulysses");
        const OpTraffic& seen = with.at(op);
        EXPECT_EQ(2 * seen.messages, (repeats ? 3 : 2) * traffic.messages) << op;
        if (repeats) {
            EXPECT_GT(seen.bytes, traffic.bytes) << op;
        } else {
            EXPECT_EQ(seen.bytes, traffic.bytes) << op;
        }
    }
}

void expect_no_difference(const Training& run,
                          const std::vector<ActivationCheckpoint>& checkpoints,
                          const Mesh& mesh) {
    const Outcome none = train(run, ActivationCheckpoint::kNone, mesh);
    for (const ActivationCheckpoint checkpoint : checkpoints) {
        const bool full = checkpoint == ActivationCheckpoint::kFull;
        SCOPED_TRACE(full ? "full" : "selective");
        const Outcome outcome = train(run, checkpoint, mesh);
        expect_same_bits(outcome, none);
        expect_traffic(outcome.traffic, none.traffic, full);
    }
}

struct LayoutChoice {
    LayoutKind stream, linear;
    bool elide = true;
};

/// Every linear mode with every full-attention mode and layout; model, dtype and backend take
/// turns.
std::vector<Training> every_run(int num_ranks) {
    std::vector<Training> runs;
    for (const LinearAttentionMode linear :
         {LinearAttentionMode::kUlysses, LinearAttentionMode::kP2p, LinearAttentionMode::kAllGather,
          LinearAttentionMode::kScan, LinearAttentionMode::kGatherHidden}) {
        for (const FullAttentionMode full :
             {FullAttentionMode::kUlysses, FullAttentionMode::kAllGather,
              FullAttentionMode::kRing}) {
            for (const LayoutChoice& layout :
                 {LayoutChoice{LayoutKind::kContiguous, LayoutKind::kContiguous},
                  LayoutChoice{LayoutKind::kZigzag, LayoutKind::kZigzag},
                  LayoutChoice{LayoutKind::kZigzag, LayoutKind::kFolded},
                  LayoutChoice{LayoutKind::kZigzag, LayoutKind::kFolded, false}}) {
                const bool converts = layout.linear != layout.stream;
                const bool splits_heads =
                    linear == LinearAttentionMode::kUlysses || full == FullAttentionMode::kUlysses;
                if ((converts && linear == LinearAttentionMode::kGatherHidden) ||
                    (splits_heads && num_ranks == 3)) {
                    continue;  // not a choice of a recipe
                }
                if (num_ranks == 1 && runs.size() == 12) {
                    return runs;  // one rank has no modes
                }
                const std::size_t turn = runs.size();
                runs.push_back({.model = turn % 3 == 0 ? "moe_tiny" : "dense_tiny",
                                .dtype = turn % 2 == 0 ? at::kBFloat16 : at::kFloat,
                                .parallel = {.cp = num_ranks,
                                             .linear_attention_mode = linear,
                                             .full_attention_mode = full,
                                             .linear_attention_backend =
                                                 turn / 2 % 2 == 0 ? LinearAttentionBackend::kFused
                                                                   : LinearAttentionBackend::kEager,
                                             .layout_kind = layout.stream,
                                             .linear_layout_kind = layout.linear,
                                             .elide_conversions = layout.elide}});
            }
        }
    }
    return runs;
}

std::string describe(const Training& run) {
    return fmt::format(
        "{} {}, linear mode {} backend {}, full mode {}, {} to {}, elide {}", run.model,
        at::toString(run.dtype), static_cast<int>(run.parallel.linear_attention_mode),
        static_cast<int>(run.parallel.linear_attention_backend),
        static_cast<int>(run.parallel.full_attention_mode), to_string(run.parallel.layout_kind),
        to_string(run.parallel.linear_layout_kind), run.parallel.elide_conversions);
}

class EveryRankCount : public ::testing::TestWithParam<int> {};

TEST_P(EveryRankCount, TwoStepsOfEveryModeAndLayoutGiveTheSameBits) {
    run_mesh(1, GetParam(), [&](const Mesh& mesh) {
        for (const Training& run : every_run(mesh.cp->size())) {
            SCOPED_TRACE(describe(run));
            expect_no_difference(run, {ActivationCheckpoint::kFull}, mesh);
        }
    });
}

TEST_P(EveryRankCount, TwentyStepsGiveTheSameBits) {
    const bool even = GetParam() % 2 == 0;
    for (const char* model : {"dense_tiny", "moe_tiny"}) {
        const bool is_fused = even == (model == std::string("moe_tiny"));
        const Training run{
            .model = model,
            .dtype = is_fused ? at::kBFloat16 : at::kFloat,
            .parallel = {.cp = GetParam(),
                         .linear_attention_mode = LinearAttentionMode::kP2p,
                         .full_attention_mode = FullAttentionMode::kRing,
                         .linear_attention_backend = is_fused ? LinearAttentionBackend::kFused
                                                              : LinearAttentionBackend::kEager,
                         .layout_kind = LayoutKind::kZigzag,
                         .linear_layout_kind =
                             is_fused ? LayoutKind::kFolded : LayoutKind::kZigzag},
            .steps = 20};
        run_mesh(1, GetParam(), [&](const Mesh& mesh) {
            SCOPED_TRACE(describe(run));
            expect_no_difference(
                run, {ActivationCheckpoint::kFull, ActivationCheckpoint::kSelective}, mesh);
        });
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, EveryRankCount, ::testing::Values(1, 2, 3, 4));

TEST(Forward, KeepsPerLayerOutputsAndRouterLogits) {
    const TokenBatch batch = packed_batch(0);
    const BatchPlan plan =
        make_batch_plan({.document_lengths = batch.document_lengths, .parallel = {}});
    const CpContext context{.group = nullptr, .plan = &plan, .parallel = {}};
    HybridModel model = load_model({.model = "moe_tiny", .parallel = {}});
    const ForwardResult none = model.forward(batch.token_ids, context, true);
    for (const ActivationCheckpoint checkpoint : kCheckpoints) {
        model.activation_checkpoint = checkpoint;
        const ForwardResult result = model.forward(batch.token_ids, context, true);
        ASSERT_EQ(result.per_layer.size(), none.per_layer.size());
        ASSERT_EQ(result.router_logits.size(), none.router_logits.size());
        for (std::size_t layer = 0; layer < none.per_layer.size(); ++layer) {
            EXPECT_TRUE(at::equal(result.per_layer[layer], none.per_layer[layer]));
            EXPECT_TRUE(at::equal(result.router_logits[layer], none.router_logits[layer]));
            EXPECT_FALSE(result.router_logits[layer].requires_grad());
        }
        EXPECT_TRUE(at::equal(result.expert_counts, none.expert_counts));
        EXPECT_TRUE(at::equal(result.probability_sums, none.probability_sums));
    }
}

/// What a sharded parameter will do: a block's weights have no storage outside its passes, and come
/// back where they were.
class StorageSwap {
  public:
    StorageSwap(const HybridModel& model, std::int64_t layer) {
        const std::string prefix = fmt::format("model.layers.{}.", layer);
        for (const NamedParameter& parameter : model.parameters()) {
            if (parameter.name.starts_with(prefix)) {
                values_.push_back(parameter.value.detach());
                copies_.push_back(values_.back().clone());
            }
        }
        EXPECT_FALSE(values_.empty());
        free();
    }
    void gather() {
        for (std::size_t i = 0; i < values_.size(); ++i) {
            const std::size_t bytes = copies_[i].nbytes();
            c10::Storage storage = values_[i].storage();
            storage.set_data_ptr_noswap(c10::GetAllocator(c10::kCPU)->allocate(bytes));
            storage.set_nbytes(bytes);
            std::memcpy(storage.mutable_data(), copies_[i].const_data_ptr(), bytes);
        }
    }
    void free() {
        for (const at::Tensor& value : values_) {
            c10::Storage storage = value.storage();
            storage.set_data_ptr_noswap({nullptr, c10::kCPU});
            storage.set_nbytes(0);
        }
    }

  private:
    std::vector<at::Tensor> values_, copies_;
};

/// Frees each block's weights while it is not computed.
class Blocks final : public ParameterResidency {
  public:
    explicit Blocks(const HybridModel& model) {
        for (std::int64_t layer = 0; layer < model.config().num_layers(); ++layer) {
            blocks_.emplace_back(model, layer);
        }
    }
    void before_forward(std::int64_t unit) override { gather(unit); }
    void after_forward(std::int64_t unit) override { free(unit); }
    void before_backward(std::int64_t unit) override { gather(unit); }
    void after_backward(std::int64_t unit) override { free(unit); }

  private:
    void gather(std::int64_t unit) {
        if (StorageSwap* block = block_of(unit)) {
            block->gather();
        }
    }
    void free(std::int64_t unit) {
        if (StorageSwap* block = block_of(unit)) {
            block->free();
        }
    }
    StorageSwap* block_of(std::int64_t unit) {
        const bool is_block = unit >= 1 && unit <= static_cast<std::int64_t>(blocks_.size());
        return is_block ? &blocks_[static_cast<std::size_t>(unit - 1)] : nullptr;
    }

    std::vector<StorageSwap> blocks_;
};

TEST(Forward, ABlocksWeightsAreNeededInItsUnitOnly) {
    const TokenBatch batch = packed_batch(0);
    const BatchPlan plan =
        make_batch_plan({.document_lengths = batch.document_lengths, .parallel = {}});
    const CpContext context{.group = nullptr, .plan = &plan, .parallel = {}};
    for (const char* name : {"dense_tiny", "moe_tiny"}) {
        const auto gradients = [&](const HybridModel& model) {
            for (const NamedParameter& parameter : model.parameters()) {
                at::Tensor value = parameter.value;
                value.mutable_grad().reset();
            }
            const ForwardResult result = model.forward(batch.token_ids, context);
            cross_entropy_lm_head(result.hidden, model.head_weight(), batch.targets)
                .loss_sum.backward();
            std::vector<at::Tensor> all;
            for (const NamedParameter& parameter : model.parameters()) {
                all.push_back(parameter.value.grad());
            }
            return all;
        };
        HybridModel model = load_model({.model = name, .dtype = at::kBFloat16, .parallel = {}});
        const std::vector<at::Tensor> expected = gradients(model);
        Blocks blocks(model);
        model.residency = &blocks;
        for (const ActivationCheckpoint checkpoint : kCheckpoints) {
            model.activation_checkpoint = checkpoint;
            const std::vector<at::Tensor> seen = gradients(model);
            for (std::size_t i = 0; i < seen.size(); ++i) {
                EXPECT_TRUE(at::equal(seen[i], expected[i])) << model.parameters()[i].name;
            }
        }
    }
}

}  // namespace
}  // namespace hybridcp
