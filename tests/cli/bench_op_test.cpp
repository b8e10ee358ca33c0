// `hcp bench gdn` and the benchmarks of single operators: small runs from end to end, their tables
// and JSON, and what they refuse. Times are only looked at for being there.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/process.h"

namespace hybridcp::testing {
namespace {

using Json = nlohmann::json;

const Json& lane_of(const Json& run, const std::string& name) {
    for (const Json& lane : run.at("lanes")) {
        if (lane.at("name") == name) {
            return lane;
        }
    }
    throw std::runtime_error("no lane " + name);
}

TEST(BenchGdn, VerifiesThenTimesEveryPass) {
    const std::string report = ::testing::TempDir() + "bench_gdn.json";
    const Outcome outcome = run_hcp({"bench",         "gdn",
                                     "--tokens",      "64,256",
                                     "--key-heads",   "1",
                                     "--value-heads", "2",
                                     "--key-dim",     "16",
                                     "--value-dim",   "32",
                                     "--backend",     "eager,reference",
                                     "--gates",       "zero25",
                                     "--pass",        "forward,backward,summary,gradient_summary",
                                     "--repeats",     "2",
                                     "--report",      report});
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_EQ(count(outcome.output, "verified: "), 1U) << outcome.output;
    EXPECT_NE(outcome.output.find("us per token at 256 over 64 tokens"), std::string::npos);
    const Json json = Json::parse(read_text(report));
    // Two backends, two dtypes, in one sequence and packed.
    ASSERT_EQ(json.at("verified").size(), 8U);
    for (const Json& table : json.at("verified")) {
        EXPECT_TRUE(table.at("passed")) << table;
        EXPECT_GE(table.at("rows").size(), 11U);
    }
    ASSERT_EQ(json.at("runs").size(), 4U);
    for (const Json& run : json.at("runs")) {
        for (const char* name : {"eager", "reference"}) {
            const Json& passes = lane_of(run, name).at("passes");
            for (const char* pass : {"forward", "backward", "forward+backward"}) {
                const Json& entry = passes.at(pass);
                EXPECT_GT(entry.at("us").get<double>(), 0.0);
                EXPECT_GE(entry.at("us").get<double>(), entry.at("us_min").get<double>());
                EXPECT_GT(entry.at("of_peak").get<double>(), 0.0);
                EXPECT_LT(entry.at("of_peak").get<double>(), 1.0);
            }
            EXPECT_GT(passes.at("forward+backward").at("peak_megabytes").get<double>(), 0.0);
            EXPECT_TRUE(passes.at("summary").contains("of_forward_backward"));
            EXPECT_TRUE(passes.at("gradient_summary").contains("of_forward_backward"));
        }
        for (const auto& [isa, gflops] : run.at("peak_gflops").items()) {
            EXPECT_GT(gflops.get<double>(), 1.0) << isa;
        }
    }
}

// The formulas of docs/benchmarks.md at K = V = 128: 6 K V + 2 C V + 2 C K / G and
// 14 K V + 5 C V + 6 C K / G with C = 32; dense with C = 64, section 2 of the kernel's design.
TEST(BenchGdn, CountsUsefulOperations) {
    const std::string report = ::testing::TempDir() + "bench_gdn_flops.json";
    const Outcome outcome =
        run_hcp({"bench", "gdn", "--tokens", "64", "--key-heads", "1", "--value-heads", "2",
                 "--dtype", "fp32", "--repeats", "1", "--report", report});
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    const Json json = Json::parse(read_text(report));
    const Json& useful = json.at("flops_per_token_and_value_head");
    EXPECT_EQ(useful.at("forward"), 6 * 16384 + 2 * 4096 + 4096);
    EXPECT_EQ(useful.at("backward"), 14 * 16384 + 5 * 4096 + 3 * 4096);
    EXPECT_EQ(json.at("flops_dense_64").at("forward"), 16384 * (8 + 1));
    EXPECT_EQ(json.at("flops_dense_64").at("backward"), 16384 * (19 + 2.5));
}

TEST(BenchGdn, EachInstructionSetOnceAndNoneThatIsMissing) {
    const Outcome outcome =
        run_hcp({"bench", "gdn", "--tokens", "64", "--key-dim", "16", "--value-dim", "16", "--isa",
                 "all", "--repeats", "1", "--dtype", "fp32", "--pass", "forward"});
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_EQ(count(outcome.output, "backward"), 0U) << outcome.output;
}

void expect_refused(std::vector<std::string> arguments, const std::string& word) {
    arguments.insert(arguments.begin(), "bench");
    const Outcome outcome = run_hcp(arguments);
    EXPECT_EQ(outcome.status, 2) << outcome.output;
    EXPECT_NE(outcome.output.find(word), std::string::npos) << outcome.output;
    EXPECT_EQ(count(outcome.output, "\n"), 1U) << outcome.output;
}

TEST(BenchGdn, RefusesInOneLine) {
    expect_refused({"gdm"}, "did you mean gdn?");
    expect_refused({"gdn", "--gates", "ls61"}, "did you mean ls16?");
    expect_refused({"gdn", "--backend", "eagre"}, "did you mean eager?");
    expect_refused({"gdn", "--dtype", "bf61"}, "did you mean bf16?");
    expect_refused({"gdn", "--pass", "foward"}, "did you mean forward?");
    expect_refused({"gdn", "--peer", "hff"}, "did you mean hf?");
    expect_refused({"gdn", "--isa", "avx22"}, "did you mean avx2?");
    expect_refused({"gdn", "--tokns", "8"}, "did you mean --tokens?");
    expect_refused({"gdn", "--tokens", "0"}, "--tokens");
    expect_refused({"gdn", "--key-heads", "3"}, "not a multiple");
    expect_refused({"gdn", "--backend", "reference"}, "--tokens up to");
    expect_refused({"gdn", "--peer", "hf", "--python", "/nowhere/python3"}, "pip install");
    expect_refused({"gated_norm", "--width", "100"}, "multiple");
    expect_refused({"norm", "--backend", "eagr"}, "did you mean eager?");
}

// Python is there; Transformers is not.
TEST(BenchGdn, SaysWhatThePeerLacks) {
    const ScratchFolder folder;
    const std::string python = folder / "python3";
    write_text(python,
               "#!/bin/sh\nread request\n"
               "echo '{\"error\": \"ModuleNotFoundError: no transformers\"}'\n");
    std::filesystem::permissions(python, std::filesystem::perms::owner_all);
    expect_refused({"gdn", "--peer", "hf", "--python", python}, "no transformers");
}

// The script's side of the conversation is checked where Transformers is; here, ours.
TEST(BenchGdn, AsksThePeerByTurns) {
    const ScratchFolder folder;
    const std::string python = folder / "python3", report = folder / "report.json";
    write_text(python,
               "#!/bin/sh\nread request\necho '{\"versions\": \"peer 1.0\"}'\n"
               "read request\necho '{\"ok\": true}'\n"
               "while read request; do echo '{\"forward_us\": 128.0, \"backward_us\": 256.0, "
               "\"peak_bytes\": 3000000}'; done\n");
    std::filesystem::permissions(python, std::filesystem::perms::owner_all);
    const Outcome outcome = run_hcp(
        {"bench",     "gdn", "--tokens",    "64",   "--key-heads", "1",    "--value-heads", "2",
         "--key-dim", "16",  "--value-dim", "16",   "--dtype",     "fp32", "--repeats",     "1",
         "--peer",    "hf",  "--python",    python, "--report",    report});
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    const Json json = Json::parse(read_text(report));
    EXPECT_EQ(json.at("hf"), "peer 1.0");
    const Json& passes = lane_of(json.at("runs").at(0), "hf").at("passes");
    EXPECT_EQ(passes.at("forward").at("us"), 1.0);  // of 64 tokens and 2 heads
    EXPECT_EQ(passes.at("forward+backward").at("us"), 3.0);
    EXPECT_EQ(passes.at("forward+backward").at("peak_megabytes"), 3.0);
}

// Where the CPU lacks what brgemm needs it is refused; elsewhere it is a row.
TEST(BenchGdn, BoundByBareProducts) {
    const Outcome outcome = run_hcp({"bench", "gdn", "--tokens", "64", "--dtype", "bf16",
                                     "--repeats", "1", "--peer", "brgemm"});
    if (outcome.status == 0) {
        EXPECT_EQ(count(outcome.output, "brgemm C=32 (bound)"), 3U) << outcome.output;
    } else {
        EXPECT_EQ(outcome.status, 2) << outcome.output;
        EXPECT_NE(outcome.output.find("brgemm: not for BFloat16"), std::string::npos);
        EXPECT_EQ(count(outcome.output, "\n"), 1U) << outcome.output;
    }
}

class BenchOp : public ::testing::TestWithParam<const char*> {};

TEST_P(BenchOp, VerifiesThenTimes) {
    const ScratchFolder folder;
    const std::string report = folder / "report.json";
    const Outcome outcome = run_hcp({"bench", GetParam(), "--tokens", "64", "--width", "512",
                                     "--repeats", "2", "--report", report});
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_EQ(count(outcome.output, "verified: "), 1U) << outcome.output;
    const Json json = Json::parse(read_text(report));
    ASSERT_EQ(json.at("runs").size(), 2U);
    for (const Json& run : json.at("runs")) {
        EXPECT_GT(run.at("copy_gigabytes_per_second").get<double>(), 0.1);
        for (const Json& variant : run.at("variants")) {
            for (const char* pass : {"forward", "backward"}) {
                EXPECT_GT(variant.at(pass).at("us").get<double>(), 0.0);
                EXPECT_GT(variant.at(pass).at("megabytes_moved").get<double>(), 0.0);
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    BenchOp,
    ::testing::Values("conv", "norm", "gated_norm", "rotary", "swiglu", "cross_entropy"),
    [](const ::testing::TestParamInfo<const char*>& op) { return std::string(op.param); });

}  // namespace
}  // namespace hybridcp::testing
