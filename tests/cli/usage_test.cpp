// What a wrong request gets: exit status 2 and one line that says how to put it right.
#include <gtest/gtest.h>

#include "cli/process.h"

namespace hybridcp::testing {
namespace {

void expect_one_line(const Outcome& outcome, const std::string& mentions) {
    EXPECT_EQ(outcome.status, 2) << outcome.output;
    EXPECT_EQ(outcome.output.rfind("hcp: ", 0), 0U) << outcome.output;
    EXPECT_EQ(count(outcome.output, "\n"), 1U) << outcome.output;
    EXPECT_NE(outcome.output.find(mentions), std::string::npos) << outcome.output;
}

TEST(Usage, UnknownWordsNameTheNearest) {
    expect_one_line(run_hcp({"trian", "x.yaml"}), "did you mean train?");
    expect_one_line(run_hcp({"verify", "modl"}), "did you mean model?");
    expect_one_line(run_hcp({"inspect", "layot"}), "did you mean layout?");
    expect_one_line(run_hcp({"verify", "op", "gnd", "x.safetensors"}), "did you mean gdn?");
}

TEST(Usage, IncompleteOrUnknownFlags) {
    expect_one_line(run_hcp({}), "hcp --help");
    expect_one_line(run_hcp({"verify"}), "hcp verify --help");
    expect_one_line(run_hcp({"train"}), "hcp train --help");
    expect_one_line(run_hcp({"inspect"}), "hcp inspect --help");
    expect_one_line(run_hcp({"train", "x.yaml", "--cp", "4"}), "--cp");
    expect_one_line(run_hcp({"train", "x.yaml", "--nproc", "many"}), "--nproc");
    expect_one_line(run_hcp({"train", "x.yaml", "--nproc", "0"}), "--nproc");
    expect_one_line(run_hcp({"export", "only_one"}), "hcp export --help");
}

TEST(Usage, WrongValues) {
    const std::string file = golden("ops/gdn/t1.safetensors");
    expect_one_line(run_hcp({"verify", "op", "gdn", file, "--dtype", "fp8"}), "fp8");
    expect_one_line(run_hcp({"verify", "op", "gdn", file, "--backend", "triton"}), "triton");
    expect_one_line(run_hcp({"verify", "op", "gdn", file, "--device", "tpu"}), "tpu");
    expect_one_line(
        run_hcp({"verify", "op", "gdn", file, "--backend", "reference", "--dtype", "bf16"}),
        "fp64");
    expect_one_line(run_hcp({"verify", "op", "conv1d", file}), "verify op gdn");
    expect_one_line(run_hcp({"verify", "op", "swiglu_mlp", file, "--dtype", "bf16"}), "fp32");
    expect_one_line(run_hcp({"train", "no/such/recipe.yaml"}), "no/such/recipe.yaml");
    expect_one_line(run_hcp({"verify", "model", golden("models/dense_tiny"), "--batch", file,
                             "--expected", file, "train.accelerator.fsdp=true"}),
                    "parameters whole");
}

TEST(Usage, RefusedBeforeTheWork) {
    const std::string recipe = golden("../../recipes/bench_cp.yaml");
    expect_one_line(
        run_hcp({"bench", "cp", recipe, "--ranks", "3", "--variants", "native-ulysses"}),
        "8 value heads over cp: 3");
    expect_one_line(run_hcp({"bench", "cp", recipe, "--documents", "0"}), "0 tokens");
    expect_one_line(run_hcp({"plan", golden("")}), "directory");
    expect_one_line(run_hcp({"plan", recipe, "--report", "/no/such/folder/x"}), "no folder");
    expect_one_line(
        run_hcp({"plan", recipe, "train.accelerator.device=cuda",
                 "train.accelerator.linear_attention_gdn_backend=fused", "model.dtype=fp32"}),
        "takes model.dtype bf16");
    expect_one_line(run_hcp({"train", recipe, "train.accelerator.device=gpu"}), "'gpu'");
    expect_one_line(run_hcp({"plan", recipe, "data.sequence_length=9223372036854775807"}),
                    "data.sequence_length");
}

TEST(Usage, HelpShowsExamples) {
    const std::vector<std::vector<std::string>> commands = {{"train"},
                                                            {"verify", "op"},
                                                            {"verify", "model"},
                                                            {"verify", "trajectory"},
                                                            {"verify", "parallel"},
                                                            {"export"},
                                                            {"inspect", "layout"},
                                                            {"inspect", "checkpoint"},
                                                            {"plan"},
                                                            {"bench", "train"},
                                                            {"version"}};
    for (std::vector<std::string> words : commands) {
        words.push_back("--help");
        const Outcome outcome = run_hcp(words);
        EXPECT_EQ(outcome.status, 0) << outcome.output;
        EXPECT_NE(outcome.output.find("Examples:\n  "), std::string::npos) << outcome.output;
    }
    EXPECT_EQ(run_hcp({"version"}).output.rfind("hcp ", 0), 0U);
}

// Every rank finds the same mistake; the user reads it once.
TEST(Usage, RanksSayItOnce) {
    const std::string model = golden("models/vl_mini");
    expect_one_line(
        run_hcp({"verify", "model", model, "--batch", model + "/b2_t33/batch.safetensors",
                 "--expected", model + "/b2_t33/expected.safetensors", "--nproc", "3",
                 "train.accelerator.linear_attention_cp_mode=zigzag"}),
        "zigzag");
}

TEST(Usage, NprocUnderAnotherLauncher) {
    const std::map<std::string, std::string> environment = {
        {"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}};
    expect_one_line(run_hcp({"train", "x.yaml", "--nproc", "2"}, environment), "leave --nproc out");
}

}  // namespace
}  // namespace hybridcp::testing
