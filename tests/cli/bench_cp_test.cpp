// `hcp bench cp`: a small run from end to end, its table and its JSON, and what it refuses.
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "cli/process.h"

namespace hybridcp::testing {
namespace {

constexpr const char* kRecipe = R"(
model: {preset: tiny, dtype: fp32}
data: {path: [unused], sequence_length: 192}
train: {steps: 1, accelerator: {full_attention_cp_mode: ring}}
)";

Outcome bench(std::vector<std::string> arguments) {
    const std::string recipe = ::testing::TempDir() + "bench_cp.yaml";
    write_text(recipe, kRecipe);
    arguments.insert(arguments.begin(), {"bench", "cp", recipe});
    return run_hcp(arguments);
}

TEST(BenchCp, VerifiesTimesAndCounts) {
    const std::string report = ::testing::TempDir() + "bench_cp.json";
    const Outcome outcome =
        bench({"--ranks", "2,3", "--warm-up", "0", "--repeats", "2", "--documents", "150,0,42",
               "--variants", "gather_hidden,convert,native-scan", "--report", report});
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_EQ(count(outcome.output, "gather_hidden"), 2U) << outcome.output;
    const auto json = nlohmann::json::parse(read_text(report));
    EXPECT_EQ(json.at("tokens"), 192);
    EXPECT_GT(json.at("linear_share").get<double>(), 0.0);
    EXPECT_LT(json.at("linear_share").get<double>(), 1.5);
    ASSERT_EQ(json.at("sizes").size(), 2U);
    for (const auto& size : json.at("sizes")) {
        ASSERT_EQ(size.at("variants").size(), 3U);
        for (const auto& variant : size.at("variants")) {
            EXPECT_GT(variant.at("step_ms").at("median").get<double>(), 0.0);
            EXPECT_EQ(variant.at("peak_megabytes_by_rank").size(),
                      size.at("ranks").get<std::size_t>());
            const bool converts = variant.at("name") == "convert";
            EXPECT_EQ(variant.contains("conversion_share"), converts) << variant;
            EXPECT_EQ(variant.at("ops_of_rank_0").contains("gather_hidden"),
                      variant.at("name") == "gather_hidden");
            // There and back for one block of three linear layers and one of attention, twice.
            if (converts) {
                EXPECT_EQ(variant.at("ops_of_rank_0").at("conversion").at("messages"), 4);
            }
        }
    }
}

TEST(BenchCp, RefusesInOneLine) {
    const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
        {{"--variants", "convrt"}, "did you mean convert?"},
        {{"--level", "block"}, "use model or layer"},
        {{"--ranks", "1"}, "--ranks"},
        {{"--repeats", "0"}, "--repeats"},
        {{"train.accelerator.cpp=2"}, "cpp"},
        {{"train.accelerator.fsdp=true"}, "bench train"},
    };
    for (const auto& [arguments, word] : cases) {
        const Outcome outcome = bench(arguments);
        EXPECT_EQ(outcome.status, 2) << outcome.output;
        EXPECT_NE(outcome.output.find(word), std::string::npos) << outcome.output;
        EXPECT_EQ(count(outcome.output, "\n"), 1U) << outcome.output;
    }
}

}  // namespace
}  // namespace hybridcp::testing
