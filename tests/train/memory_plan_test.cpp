// What a step's tensors take, against the plan, byte by byte.
#include "plan/memory_plan.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <mutex>

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
            const auto source = parameter_source(recipe);
            TensorMemory memory;
            TrainedModel trained(trained_model_options(recipe, parallel), *source, mesh);
            memory.reset_peaks();
            std::vector<TokenBatch> batches;
            for (std::int64_t i = 0; i < sizes.micro_batches; ++i) {
                batches.push_back(make_batch(sizes.rows, sizes.row_tokens));
            }
            (void)trained.forward_backward(batches, parallel);
            (void)trained.update(1e-3, 1.0);
            const std::lock_guard lock(mutex);
            const MemoryRecord record = memory.record();
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

}  // namespace
}  // namespace hybridcp
