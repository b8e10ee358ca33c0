// `hcp plan`: the table, the verdict, the report, and what it refuses.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/process.h"

namespace hybridcp::testing {
namespace {

const std::string kRecipe = HCP_SOURCE_DIR "/recipes/plan_35b_256k.yaml";

Outcome plan(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"plan", kRecipe});
    return run_hcp(arguments);
}

TEST(Plan, TheLargestModelFitsWithFullCheckpointing) {
    const Outcome outcome = plan({"--hbm", "53.3GB", "--nproc", "32"});
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_NE(outcome.output.find("linear attention"), std::string::npos);
    EXPECT_NE(outcome.output.find("it fits 53.30 GB: "), std::string::npos) << outcome.output;
    EXPECT_EQ(outcome.output.find('\x1b'), std::string::npos);
}

TEST(Plan, WhatDoesNotFitNamesTheChangesThatHelp) {
    const std::string report = ::testing::TempDir() + "hcp_plan.json";
    const Outcome outcome =
        plan({"train.activation_checkpoint=none", "train.accelerator.fsdp=false", "--hbm", "80 GB",
              "--color", "always", "--report", report});
    EXPECT_EQ(outcome.status, 1);
    EXPECT_NE(outcome.output.find("it does not fit 80.00 GB"), std::string::npos) << outcome.output;
    EXPECT_NE(outcome.output.find("train.accelerator.fsdp=true"), std::string::npos);
    EXPECT_NE(outcome.output.find("\x1b[48;5;"), std::string::npos);
    const nlohmann::json json = nlohmann::json::parse(std::ifstream(report));
    EXPECT_FALSE(json.at("fits").get<bool>());
    EXPECT_EQ(json.at("hbm_bytes"), 80'000'000'000);
    std::int64_t sum = 0;
    for (const auto& bytes : json.at("at_peak_bytes")) {
        sum += bytes.get<std::int64_t>();
    }
    EXPECT_EQ(sum, json.at("total_bytes"));
    ASSERT_GE(json.at("changes").size(), 2U);
    EXPECT_LT(json.at("changes")[0].at("total_bytes"), json.at("total_bytes"));
}

TEST(Plan, RefusesInOneLine) {
    const auto refused = [](const std::vector<std::string>& arguments, const std::string& words) {
        const Outcome outcome = plan(arguments);
        EXPECT_EQ(outcome.status, 2) << outcome.output;
        EXPECT_NE(outcome.output.find(words), std::string::npos) << outcome.output;
        EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1);
    };
    refused({"--hbm", "80"}, "--hbm: '80' is not a size: write 80GB");
    refused({"--hbm", "-1GB"}, "is not a size");
    refused({"--nproc", "8"}, "--nproc 8: the recipe is for 32 ranks");
    refused({"train.accelerator.fsdp_shard_size=5"}, "fsdp_shard_size");
    refused({"--color", "blue"}, "--color: blue");
}

}  // namespace
}  // namespace hybridcp::testing
