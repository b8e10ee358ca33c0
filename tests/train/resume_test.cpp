// A run that is saved on some ranks and goes on on others: the next losses are those of the run
// that was never stopped.
#include <gtest/gtest.h>

#include <sstream>

#include "checkpoint_cases.h"
#include "core/files.h"
#include "hybridcp/error.h"
#include "train/checkpoint_folders.h"
#include "train/trainer.h"

namespace hybridcp {
namespace {

using testing::message_of;
using testing::run_mesh;
using testing::TemporaryFolder;

constexpr std::int64_t kSavedStep = 3;
constexpr std::int64_t kNextSteps = 10;
constexpr double kLossBar = 1e-6;  // relative

/// Overrides of train.accelerator.
using Ranks = std::vector<std::string>;

Recipe make_recipe(const TemporaryFolder& folder, const std::string& run, const Ranks& ranks) {
    std::string text;
    for (int i = 0; i < 400; ++i) {
        text += fmt::format("line {} of a text that repeats itself, {} times\n", i, i % 7);
    }
    std::vector<std::string> overrides{"model.path=" + testing::kModelFolder,
                                       "data.path=" + folder.write("text.txt", text),
                                       "checkpoint.dir=" + folder / run};
    for (const std::string& word : ranks) {
        overrides.push_back("train.accelerator." + word);
    }
    return parse_recipe(
        fmt::format("model: {{dtype: fp32}}\n"
                    "data: {{sequence_length: 48}}\n"
                    "train:\n"
                    "  steps: {}\n"
                    "  schedule: {{warmup_steps: 2}}\n"
                    "  accelerator: {{linear_attention_cp_mode: p2p, full_attention_cp_mode: "
                    "all_gather}}\n"
                    "checkpoint: {{every: {}, keep: 9}}\n",
                    kSavedStep + kNextSteps, kSavedStep),
        "test", overrides);
}

/// The losses after kSavedStep.
std::vector<double> train(const Recipe& recipe, std::string* output = nullptr) {
    std::vector<double> losses;
    std::ostringstream out;
    const ParallelOptions& options = recipe.train.accelerator;
    run_mesh(
        options.dp, options.cp,
        [&](const Mesh& mesh) {
            const bool first = mesh.world->rank() == 0;
            (void)run_training(
                recipe, mesh,
                {.out = first ? &out : nullptr, .on_step = [&](const StepMetrics& metrics) {
                     if (first && metrics.step > kSavedStep) {
                         losses.push_back(metrics.loss);
                     }
                 }});
        },
        shard_size(options));
    if (output != nullptr) {
        *output = out.str();
    }
    return losses;
}

struct Pair {
    std::string name;
    Ranks saved, resumed;
};

const std::vector<Pair> kPairs{
    {"OneToZigzag", {}, {"cp=4", "sequence_layout=zigzag", "full_attention_cp_mode=ring"}},
    {"ShardedToOne", {"dp=2", "cp=2", "fsdp=true"}, {}},
    {"FoldedToHybrid",
     {"cp=4", "fsdp=true", "sequence_layout=folded", "linear_attention_cp_mode=all_gather"},
     {"dp=2", "cp=2", "fsdp=true", "fsdp_shard_size=2"}},
    {"DataToContext", {"dp=4", "fsdp=true"}, {"cp=3", "linear_attention_cp_mode=scan"}},
    {"ThreeToFour", {"cp=3", "fsdp=true"}, {"dp=2", "cp=2"}},
    {"HybridToFive",
     {"dp=2", "cp=2", "fsdp=true", "fsdp_shard_size=2"},
     {"cp=5", "fsdp=true", "sequence_layout=zigzag"}},
    {"WholeToSharded", {"cp=2", "linear_attention_cp_mode=scan"}, {"dp=2", "fsdp=true"}},
    {"DataToEight", {"dp=2"}, {"cp=8", "fsdp=true"}},
    {"GatherToUlysses",
     {"cp=2", "fsdp=true", "linear_attention_cp_mode=gather_hidden"},
     {"cp=2", "linear_attention_cp_mode=ulysses", "full_attention_cp_mode=ulysses"}},
    {"HybridToWide",
     {"dp=2", "cp=4", "fsdp=true", "fsdp_shard_size=4"},
     {"dp=4", "cp=2", "fsdp=true", "fsdp_shard_size=2"}},
};

class Resume : public ::testing::TestWithParam<Pair> {};
INSTANTIATE_TEST_SUITE_P(Pairs, Resume, ::testing::ValuesIn(kPairs), [](const auto& pair) {
    return pair.param.name;
});

TEST_P(Resume, GoesOnWithTheSameLosses) {
    const TemporaryFolder folder;
    const std::vector<double> whole = train(make_recipe(folder, "whole", GetParam().saved));
    ASSERT_EQ(whole.size(), static_cast<std::size_t>(kNextSteps));
    const std::string saved = step_folder(folder / "whole", kSavedStep);

    Recipe other = make_recipe(folder, "other", GetParam().resumed);
    other.checkpoint.resume = saved;
    std::string output;
    const std::vector<double> resumed = train(other, &output);
    ASSERT_EQ(resumed.size(), whole.size()) << output;
    for (std::size_t i = 0; i < whole.size(); ++i) {
        EXPECT_NEAR(resumed[i], whole[i], kLossBar * whole[i]) << "step " << kSavedStep + 1 + i;
    }

    Recipe same = make_recipe(folder, "same", GetParam().saved);
    same.checkpoint.resume = saved;
    EXPECT_EQ(train(same), whole) << "on the same ranks, bit by bit";
}

// Another run may neither write nor tidy there.
TEST(CheckpointDir, IsForOneRunAtATime) {
    const TemporaryFolder folder;
    const Recipe recipe = make_recipe(folder, "run", {"cp=2"});
    std::string message;
    run_mesh(1, 2, [&](const Mesh& mesh) {
        (void)run_training(recipe, mesh, {.on_step = [&](const StepMetrics& metrics) {
                               if (mesh.world->rank() == 0 && metrics.step == kSavedStep + 1) {
                                   run_mesh(1, 1, [&](const Mesh& alone) {
                                       const Recipe second = make_recipe(folder, "run", {});
                                       message =
                                           message_of([&] { (void)run_training(second, alone); });
                                   });
                               }
                           }});
    });
    EXPECT_EQ(message.find(folder / "run is in use by another run (process "), 0U) << message;
    EXPECT_EQ(checkpoint_damage(step_folder(folder / "run", kSavedStep)), std::nullopt);
}

TEST(CheckpointDir, ADamagedNewestIsSkippedOnEveryRankAndAChosenOneIsRefused) {
    const TemporaryFolder folder;
    Recipe recipe = make_recipe(folder, "run", {"cp=3", "fsdp=true"});
    const std::vector<double> whole = train(recipe);
    for (const std::int64_t step : {6, 9, 12, 13}) {
        const std::string part =
            step_folder(folder / "run", step) + "/part-00001-of-00003.safetensors";
        std::string content = read_file(part);
        content[content.size() - 50] = static_cast<char>(content[content.size() - 50] ^ 4);
        std::ofstream(part, std::ios::binary) << content;
    }
    recipe.checkpoint.resume = step_folder(folder / "run", 9);
    const std::string refusal = message_of([&] { (void)train(recipe); });
    EXPECT_EQ(refusal.find("checkpoint.resume: " + recipe.checkpoint.resume +
                           "/part-00001-of-00003.safetensors: tensor exp_avg_sq."),
              0U)
        << refusal;
    recipe.checkpoint.resume = "auto";
    std::string output;
    EXPECT_EQ(train(recipe, &output), whole) << output;
    EXPECT_NE(output.find("resuming from " + step_folder(folder / "run", kSavedStep)),
              std::string::npos)
        << output;
    EXPECT_NE(output.find("(dp 1, cp 3, p2p, all_gather, contiguous layout, parameters over 3)"),
              std::string::npos)
        << output;
}

}  // namespace
}  // namespace hybridcp
