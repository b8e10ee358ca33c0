// `hcp train` as processes: a killed rank ends the run, a stopped run goes on where it was, export
// loads back.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/training_run.h"

namespace hybridcp::testing {
namespace {

TEST(Train, AKilledRankEndsTheRun) {
    const ScratchFolder folder;
    HcpProcess process(
        {"train", write_recipe(folder, 100000), "--nproc", "3", "train.accelerator.cp=3"});
    ASSERT_TRUE(wait_for_step(folder, 2)) << process.output();
    const pid_t victim = rank_process(process.pid(), 1);
    ASSERT_GT(victim, 0);
    kill(victim, SIGKILL);
    EXPECT_EQ(process.wait(std::chrono::seconds(60)), 1) << process.output();
    EXPECT_NE(process.output().find("rank 1 was killed by signal 9 (Killed)"), std::string::npos)
        << process.output();
    // Both others end by themselves and name the rank that is gone.
    EXPECT_EQ(process.output().find("did not end by themselves"), std::string::npos)
        << process.output();
    EXPECT_GE(count(process.output(), "hcp: "), 2U) << process.output();
}

TEST(Train, RanksDieWithTheLauncher) {
    const ScratchFolder folder;
    HcpProcess process({"train", write_recipe(folder, 100000), "--nproc", "2"});
    ASSERT_TRUE(wait_for_step(folder, 1)) << process.output();
    const pid_t rank = rank_process(process.pid(), 0);
    ASSERT_GT(rank, 0);
    kill(process.pid(), SIGKILL);
    EXPECT_EQ(process.wait(), 128 + SIGKILL);
    for (int attempt = 0; attempt < 500 && kill(rank, 0) == 0; ++attempt) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    const std::string state = read_text("/proc/" + std::to_string(rank) + "/stat");
    EXPECT_TRUE(state.empty() || state.find(") Z") != std::string::npos) << state;
}

TEST(Train, StoppedAndResumedIsTheSameRun) {
    const int steps = 12;
    const ScratchFolder whole;
    const Outcome outcome = run_hcp({"train", write_recipe(whole, steps), "--nproc", "2"});
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_NE(outcome.output.find("bits per byte"), std::string::npos) << outcome.output;
    EXPECT_NE(outcome.output.find("loss curve: "), std::string::npos) << outcome.output;
    ASSERT_EQ(losses(whole).size(), static_cast<std::size_t>(steps));

    const ScratchFolder stopped;
    const std::string recipe = write_recipe(stopped, steps);
    HcpProcess process({"train", recipe, "--nproc", "2"});
    ASSERT_TRUE(wait_for_step(stopped, 3)) << process.output();
    kill(process.pid(), SIGTERM);
    EXPECT_EQ(process.wait(), 0) << process.output();
    const std::size_t done = losses(stopped).size();
    ASSERT_LT(done, static_cast<std::size_t>(steps)) << "stopped too late to say anything";
    EXPECT_NE(process.output().find("stopped by a signal"), std::string::npos) << process.output();
    const Outcome resumed = run_hcp({"train", recipe, "--nproc", "2"});
    EXPECT_EQ(resumed.status, 0) << resumed.output;
    EXPECT_EQ(losses(stopped), losses(whole));

    const Outcome exported = run_hcp({"export", whole / "run", whole / "exported"});
    EXPECT_EQ(exported.status, 0) << exported.output;
    EXPECT_TRUE(std::filesystem::exists(whole / "exported/config.json"));
    EXPECT_TRUE(std::filesystem::exists(whole / "exported/model.safetensors"));
    EXPECT_EQ(run_hcp({"export", whole / "exported/nothing", whole / "other"}).status, 2);
}

TEST(Train, ParallelEqualsOneRank) {
    const ScratchFolder folder;
    const std::string recipe = write_recipe(folder, 4);
    const Outcome outcome =
        run_hcp({"verify", "parallel", recipe, "--nproc", "2", "--report", folder / "r.json"});
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    const auto report = nlohmann::json::parse(read_text(folder / "r.json")).at("reports").at(0);
    EXPECT_EQ(report.at("steps").at("loss").size(), 4U);
    EXPECT_LT(report.at("final_parameter_rel_l2").get<double>(), 1e-4);
    // bf16 is off by more than the fp32 bar, but within its own.
    const Outcome bf16 =
        run_hcp({"verify", "parallel", recipe, "--nproc", "2", "model.dtype=bf16"});
    EXPECT_EQ(bf16.status, 0) << bf16.output;
}

}  // namespace
}  // namespace hybridcp::testing
