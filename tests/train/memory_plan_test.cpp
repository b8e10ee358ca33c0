// What a step's tensors take, against the plan, byte by byte.
#include "plan/memory_plan.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <mutex>

#include "kernels/loss/cross_entropy.h"
#include "mesh_threads.h"
#include "train/memory_plan_input.h"
#include "train/memory_report.h"
#include "train/model_setup.h"
#include "train/trained_model.h"

namespace hybridcp {
namespace {

struct Case {
    std::string name;
    std::vector<std::string> choices;  // train.accelerator.X=... without the prefix, or whole keys
    std::int64_t row_tokens = 512;
};

std::vector<std::string> overrides_of(const Case& test) {
    std::vector<std::string> all{"model.preset=tiny", "model.dtype=fp32", "data.path=[unused]",
                                 fmt::format("data.sequence_length={}", test.row_tokens),
                                 "train.global_batch_size=1"};
    for (const std::string& choice : test.choices) {
        const bool is_whole = choice.starts_with("model.") || choice.starts_with("train.");
        all.push_back(is_whole ? choice : "train.accelerator." + choice);
    }
    return all;
}

TokenBatch make_batch(std::int64_t rows, std::int64_t row_tokens) {
    TokenBatch batch;
    batch.document_lengths.assign(static_cast<std::size_t>(rows), row_tokens);
    batch.token_ids = at::arange(rows * row_tokens, at::kLong) * 37 % 256;
    batch.targets = (batch.token_ids * 3 + 5) % 256;
    return batch;
}

struct StepMemory {
    MemoryRecord record;        // of the step
    BytesByClass live_bytes{};  // after it
};

/// A step on this rank of `batches` equal micro-batches.
StepMemory measure_step(const TrainedModelOptions& options,
                        const ParameterSource& source,
                        const Mesh& mesh,
                        const Parallel& parallel,
                        const std::vector<TokenBatch>& batches) {
    TensorMemory memory;
    TrainedModel trained(options, source, mesh);
    memory.reset_peaks();
    (void)trained.forward_backward(batches, parallel);
    (void)trained.update(1e-3, 1.0);
    StepMemory result{.record = memory.record()};
    for (std::size_t i = 0; i < kNumMemoryClasses; ++i) {
        result.live_bytes.at(i) = memory.live_bytes(static_cast<MemoryClass>(i));
    }
    return result;
}

/// A step of the recipe, on all ranks; that of the rank with the largest peak.
MemoryRecord measure(const Recipe& recipe) {
    const Parallel parallel =
        make_parallel(recipe.train.accelerator, recipe_model_config(recipe.model).head_counts(),
                      recipe.model.dtype);
    const plan::MemoryPlanInput sizes = memory_plan_input(recipe);
    MemoryRecord largest;
    std::mutex mutex;
    testing::run_mesh(
        parallel.dp, parallel.cp,
        [&](const Mesh& mesh) {
            const std::vector<TokenBatch> batches(static_cast<std::size_t>(sizes.micro_batches),
                                                  make_batch(sizes.rows, sizes.row_tokens));
            const MemoryRecord record =
                measure_step(trained_model_options(recipe, parallel), *parameter_source(recipe),
                             mesh, parallel, batches)
                    .record;
            const std::lock_guard lock(mutex);
            largest = record.peak_bytes > largest.peak_bytes ? record : largest;
        },
        parallel.shard_size);
    return largest;
}

std::string compare(const MemoryRecord& measured, const plan::PeakMemory& planned) {
    std::string text = fmt::format("peak in {}: measured {}, planned {}\n", planned.moment,
                                   measured.peak_bytes, planned.total_bytes);
    for (std::size_t i = 0; i < kNumMemoryClasses; ++i) {
        text += fmt::format("  {:<24}{:>12}{:>12}   own peak{:>12}{:>12}\n",
                            name_of(static_cast<MemoryClass>(i)), measured.at_peak_bytes.at(i),
                            planned.at_peak_bytes.at(i), measured.class_peak_bytes.at(i),
                            planned.class_peak_bytes.at(i));
    }
    return text;
}

class MeasuredMemory : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(
    Configurations,
    MeasuredMemory,
    ::testing::Values(
        Case{.name = "Dense", .choices = {}, .row_tokens = 1500},
        Case{.name = "DenseFused",
             .choices = {"linear_attention_gdn_backend=fused"},
             .row_tokens = 1500},
        Case{.name = "DenseBf16Fused",
             .choices = {"model.dtype=bf16", "linear_attention_gdn_backend=fused"},
             .row_tokens = 1500},
        Case{.name = "DenseFull",
             .choices = {"train.activation_checkpoint=full"},
             .row_tokens = 1500},
        Case{.name = "DenseSelective",
             .choices = {"train.activation_checkpoint=selective"},
             .row_tokens = 1500},
        Case{.name = "Moe", .choices = {"model.preset=tiny-moe"}, .row_tokens = 1500},
        Case{.name = "MoeBf16Full",
             .choices = {"model.preset=tiny-moe", "model.dtype=bf16",
                         "train.activation_checkpoint=full", "linear_attention_gdn_backend=fused"},
             .row_tokens = 1500},
        Case{.name = "Cp2P2pSharded",
             .choices = {"cp=2", "fsdp=true", "linear_attention_cp_mode=p2p",
                         "full_attention_cp_mode=all_gather"},
             .row_tokens = 2000},
        Case{.name = "Cp4RingFusedFullSharded",
             .choices = {"cp=4", "fsdp=true", "linear_attention_cp_mode=p2p",
                         "linear_attention_gdn_backend=fused", "full_attention_cp_mode=ring",
                         "sequence_layout=zigzag", "train.activation_checkpoint=full"},
             .row_tokens = 4000},
        Case{.name = "Cp2Ulysses", .choices = {"cp=2"}, .row_tokens = 2000},
        Case{.name = "Dp2Cp2Bf16MoeSharded",
             .choices = {"model.preset=tiny-moe", "dp=2", "cp=2", "fsdp=true", "model.dtype=bf16",
                         "linear_attention_cp_mode=all_gather", "full_attention_cp_mode=all_gather",
                         "linear_attention_gdn_backend=fused", "train.global_batch_size=4"},
             .row_tokens = 2000},
        Case{.name = "Dp2TwoMicroBatches",
             .choices = {"dp=2", "train.global_batch_size=8", "train.micro_batch_size=2"},
             .row_tokens = 600},
        Case{
            .name = "Cp2Converted",
            .choices = {"cp=2", "fsdp=true", "linear_attention_cp_mode=p2p",
                        "full_attention_cp_mode=ring", "sequence_layout=zigzag",
                        "linear_attention_layout=convert", "train.activation_checkpoint=selective"},
            .row_tokens = 2000}),
    [](const auto& each) { return each.param.name; });

TEST_P(MeasuredMemory, IsThePlansWithinFivePercent) {
    const Recipe recipe = parse_recipe("", "test", overrides_of(GetParam()));
    const MemoryRecord measured = measure(recipe);
    const plan::PeakMemory planned = plan::plan_memory(memory_plan_input(recipe));
    const auto peak = static_cast<double>(measured.peak_bytes);
    const std::string table = compare(measured, planned);
    EXPECT_NEAR(static_cast<double>(planned.total_bytes), peak, 0.05 * peak) << table;
    if (std::getenv("HCP_MEMORY_TABLES") != nullptr) {
        fmt::print("{}", table);
    }
}

/// Autograd keeps the head's gradient until the embedding's is added to it.
TEST(TiedHead, PlannedGradientsAreThoseOfAShardedStep) {
    const Recipe recipe =
        parse_recipe("", "test",
                     overrides_of({.name = "Tied",
                                   .choices = {"cp=2", "fsdp=true", "linear_attention_cp_mode=p2p",
                                               "full_attention_cp_mode=all_gather"},
                                   .row_tokens = 200}));
    const Parallel parallel =
        make_parallel(recipe.train.accelerator, recipe_model_config(recipe.model).head_counts(),
                      recipe.model.dtype);
    TrainedModelOptions options = trained_model_options(recipe, parallel);
    options.config.tie_word_embeddings = true;
    options.config.vocab_size = 20000;
    plan::MemoryPlanInput input = memory_plan_input(recipe);
    input.model = model_sizes(options.config);
    const plan::PeakMemory planned = plan::plan_memory(input);
    testing::run_mesh(
        1, 2,
        [&](const Mesh& mesh) {
            const MemoryRecord measured =
                measure_step(options, *random_parameters(options.config, 5), mesh, parallel,
                             {make_batch(1, 200)})
                    .record;
            const std::string table = compare(measured, planned);
            const auto peak = static_cast<double>(measured.peak_bytes);
            EXPECT_NEAR(static_cast<double>(planned.total_bytes), peak, 0.05 * peak) << table;
            const std::size_t gradients = index_of(MemoryClass::kGradients);
            const auto own = static_cast<double>(measured.class_peak_bytes.at(gradients));
            EXPECT_NEAR(static_cast<double>(planned.class_peak_bytes.at(gradients)), own,
                        0.05 * own)
                << table;
        },
        2);
}

std::int64_t own_peak(const StepMemory& memory, MemoryClass memory_class) {
    return memory.record.class_peak_bytes.at(index_of(memory_class));
}

/// `tiny` with its four layers over and over, checkpointed in full, two ranks; rank 0's.
StepMemory measure_full(int num_layers, std::int64_t row_tokens) {
    ModelConfig config = preset_model_config("tiny");
    for (int layer = 4; layer < num_layers; ++layer) {
        config.layer_types.push_back(config.layer_types[static_cast<std::size_t>(layer % 4)]);
    }
    const Parallel parallel{.cp = 2,
                            .linear_attention_mode = LinearAttentionMode::kP2p,
                            .full_attention_mode = FullAttentionMode::kAllGather,
                            .linear_attention_backend = LinearAttentionBackend::kFused};
    StepMemory first;
    testing::run_mesh(1, 2, [&](const Mesh& mesh) {
        const StepMemory memory = measure_step(
            {.config = config, .activation_checkpoint = ActivationCheckpoint::kFull},
            *random_parameters(config, 5), mesh, parallel, {make_batch(1, row_tokens)});
        if (mesh.world->rank() == 0) {
            first = memory;
        }
    });
    return first;
}

TEST(FullCheckpointing, KeepsBoundariesExchangeResultsAndOneBlock) {
    constexpr std::int64_t kTokens = 700, kMoreLayers = 8;  // of a rank
    const ModelConfig config = preset_model_config("tiny");
    const StepMemory few = measure_full(4, 2 * kTokens);
    const StepMemory many = measure_full(4 + kMoreLayers, 2 * kTokens);
    const auto growth = [&](MemoryClass memory_class) {
        return own_peak(many, memory_class) - own_peak(few, memory_class);
    };
    constexpr std::int64_t kFullLayers = kMoreLayers / 4, kLinearLayers = kMoreLayers - kFullLayers;
    EXPECT_EQ(growth(MemoryClass::kStream), kMoreLayers * 4 * kTokens * config.hidden_size);
    // The gradients of the norms' vectors, which are counted with their half.
    EXPECT_EQ(growth(MemoryClass::kFeedForward), kMoreLayers * 4 * config.hidden_size);
    // Of the layers themselves: o of attention, and M, which the backward exchange needs.
    const std::int64_t vectors_bytes = 4 * (config.hidden_size + 2 * config.head_dim);
    EXPECT_NEAR(static_cast<double>(growth(MemoryClass::kFullAttention)),
                static_cast<double>(kFullLayers * 4 * kTokens * config.num_attention_heads *
                                    config.head_dim),
                static_cast<double>(kFullLayers * vectors_bytes));
    const std::int64_t state_bytes = 4 * config.linear_num_value_heads *
                                     config.linear_key_head_dim * config.linear_value_head_dim;
    EXPECT_LE(
        growth(MemoryClass::kLinearAttention),
        kLinearLayers * (state_bytes + 4 * (config.hidden_size + 5 * config.conv_channels())));
    // Halos and start states.
    EXPECT_LE(growth(MemoryClass::kExchange),
              kLinearLayers * (state_bytes + 4 * 3 * config.conv_channels()));
    EXPECT_GT(growth(MemoryClass::kExchange), kLinearLayers * state_bytes / 2);
    EXPECT_LT(std::abs(growth(MemoryClass::kOther)), 4096);
}

TEST(ShardedMemory, StateAfterAStepFallsWithTheRanks) {
    const ModelConfig config = preset_model_config("tiny");
    std::int64_t numel = 0;
    for (const plan::PlannedParameter& parameter : model_sizes(config).parameters) {
        numel += parameter.numel;
    }
    for (const auto& [dp, cp] : {std::pair{1, 1}, {1, 2}, {2, 2}, {1, 4}}) {
        const int num_ranks = dp * cp;
        const Parallel parallel{.dp = dp,
                                .cp = cp,
                                .linear_attention_mode = LinearAttentionMode::kP2p,
                                .full_attention_mode = FullAttentionMode::kAllGather};
        testing::run_mesh(
            dp, cp,
            [&](const Mesh& mesh) {
                const StepMemory memory =
                    measure_step({.config = config, .sharded = true}, *random_parameters(config, 5),
                                 mesh, parallel, {make_batch(1, 100)});
                const auto part = static_cast<double>(4 * numel) / num_ranks;
                const auto live = [&](MemoryClass memory_class) {
                    return static_cast<double>(memory.live_bytes.at(index_of(memory_class)));
                };
                EXPECT_NEAR(live(MemoryClass::kParameters), part, 0.02 * part);
                EXPECT_NEAR(live(MemoryClass::kGradients), part, 0.02 * part);
                EXPECT_NEAR(live(MemoryClass::kOptimizer), 2 * part, 0.04 * part);
            },
            num_ranks);
    }
}

class LossMemory : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, LossMemory, ::testing::Values(at::kFloat, at::kBFloat16));

TEST_P(LossMemory, DoesNotGrowWithVocabularyTimesTokens) {
    constexpr std::int64_t kVocabulary = 248'320, kHidden = 8, kRows = 32;
    const at::Tensor weight = at::full({kVocabulary, kHidden}, 0.01).requires_grad_(true);
    const auto measure_loss = [&](std::int64_t tokens) {
        const at::Tensor hidden = at::ones({tokens, kHidden}, GetParam()).requires_grad_(true);
        const at::Tensor targets = at::arange(tokens, at::kLong) * 1000;
        TensorMemory memory;
        cross_entropy_lm_head(hidden, weight, targets, kRows).loss_sum.backward();
        weight.mutable_grad().reset();
        return memory.record();
    };
    const auto of = [](const MemoryRecord& record, MemoryClass memory_class) {
        return record.class_peak_bytes.at(index_of(memory_class));
    };
    const MemoryRecord few = measure_loss(64), many = measure_loss(192);
    constexpr std::int64_t kHeadBytes = 4 * kVocabulary * kHidden;
    EXPECT_LT(std::abs(many.peak_bytes - few.peak_bytes), 64 << 10);
    EXPECT_LT(std::abs(of(many, MemoryClass::kLogits) - of(few, MemoryClass::kLogits)), 64 << 10);
    // One gradient of the head: no copy of it, scaled or summed.
    EXPECT_EQ(of(many, MemoryClass::kGradients), kHeadBytes);
    // No logits in fp32: one chunk in the dtype, the head's copy in it, slices of what is widened.
    const auto element_bytes = static_cast<std::int64_t>(c10::elementSize(GetParam()));
    const std::int64_t copy_bytes = GetParam() == at::kFloat ? 0 : 2 * kVocabulary * kHidden;
    EXPECT_LT(of(many, MemoryClass::kLogits),
              element_bytes * kRows * kVocabulary + copy_bytes + (4 << 20));
}

}  // namespace
}  // namespace hybridcp
