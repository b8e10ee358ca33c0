// `hcp bench train`: every variant is the first one's step, and sharding does what it is for.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/process.h"

namespace hybridcp::testing {
namespace {

constexpr const char* kRecipe = R"(
model: {preset: tiny, dtype: fp32}
data: {path: [unused], sequence_length: 65}
train:
  steps: 1
  global_batch_size: 2
  accelerator: {cp: 2, linear_attention_cp_mode: p2p, full_attention_cp_mode: ring}
)";

Outcome bench(std::vector<std::string> arguments) {
    const std::string recipe = ::testing::TempDir() + "bench_train.yaml";
    write_text(recipe, kRecipe);
    arguments.insert(arguments.begin(), {"bench", "train", recipe});
    return run_hcp(arguments);
}

TEST(BenchTrain, VerifiesTimesAndCounts) {
    const std::string report = ::testing::TempDir() + "bench_train.json";
    const Outcome outcome =
        bench({"--nproc", "2", "--warm-up", "1", "--repeats", "1", "--variants",
               "whole,sharded,sharded-no-prefetch,sharded-full", "--report", report});
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    const auto json = nlohmann::json::parse(read_text(report));
    const auto& variants = json.at("variants");
    ASSERT_EQ(variants.size(), 4U);
    const auto& whole = variants[0].at("ops_of_rank_0");
    EXPECT_TRUE(whole.contains("gradients"));
    EXPECT_FALSE(whole.contains("parameter_gather"));
    for (std::size_t i = 1; i < variants.size(); ++i) {
        const auto& ops = variants[i].at("ops_of_rank_0");
        EXPECT_FALSE(ops.contains("gradients"));
        EXPECT_EQ(ops.at("parameter_gather"),
                  variants[1].at("ops_of_rank_0").at("parameter_gather"));
        // Values, gradients and moments of half the parameters against values and moments of all.
        EXPECT_LT(variants[i].at("state_megabytes").get<double>(),
                  0.7 * variants[0].at("state_megabytes").get<double>());
        EXPECT_GT(variants[i].at("median_ms").get<double>(), 0.0);
    }
}

TEST(BenchTrain, RefusesAnUnknownVariantInOneLine) {
    const Outcome outcome = bench({"--variants", "shraded", "train.accelerator.cp=1"});
    EXPECT_EQ(outcome.status, 2) << outcome.output;
    EXPECT_EQ(count(outcome.output, "\n"), 1U) << outcome.output;
    EXPECT_NE(outcome.output.find("sharded"), std::string::npos) << outcome.output;
}

}  // namespace
}  // namespace hybridcp::testing
