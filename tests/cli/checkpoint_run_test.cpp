// Checkpoints as a user meets them: a rank that is killed while all save, two runs on one folder,
// inspect, export.
#include <gtest/gtest.h>

#include <algorithm>

#include "cli/training_run.h"

namespace hybridcp::testing {
namespace {

namespace fs = std::filesystem;

/// Step folders of a run by suffix: "" for complete ones.
std::vector<std::string> step_folders(const std::string& run, const std::string& suffix) {
    std::vector<std::string> found;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(run, none)) {
        const std::string name = entry.path().filename();
        const std::string number = name.substr(0, 13);
        if (name.starts_with("step-") && name.substr(number.size()) == suffix) {
            found.push_back(entry.path());
        }
    }
    std::sort(found.begin(), found.end());
    return found;
}

void flip_byte(const std::string& path, std::streamoff from_end) {
    std::string content = read_text(path);
    char& byte = content[content.size() - static_cast<std::size_t>(from_end)];
    byte = static_cast<char>(byte ^ 16);
    write_text(path, content);
}

// Four times at another moment of a save; the next run goes on from what was complete.
TEST(CheckpointRun, ARankKilledDuringASaveLosesNothing) {
    const ScratchFolder folder;
    const std::string recipe = write_recipe(folder, 100000);
    const std::string run = folder / "run";
    std::size_t unfinished = 0;
    for (int round = 0; round < 4; ++round) {
        HcpProcess process({"train", recipe, "--nproc", "3", "train.accelerator.cp=3",
                            "train.accelerator.fsdp=true", "checkpoint.every=1",
                            "train.comm_timeout_seconds=20"});
        const std::size_t before = losses(folder).size();
        ASSERT_TRUE(wait_for_step(folder, static_cast<int>(before) + 2)) << process.output();
        const pid_t victim = rank_process(process.pid(), round % 3);
        ASSERT_GT(victim, 0);
        for (int attempt = 0; attempt < 200000 && step_folders(run, ".tmp").empty(); ++attempt) {
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2 * round));
        kill(victim, SIGKILL);
        EXPECT_EQ(process.wait(std::chrono::seconds(60)), 1) << process.output();
        EXPECT_EQ(process.output().find("did not end by themselves"), std::string::npos)
            << process.output();
        unfinished += step_folders(run, ".tmp").size();
        const Outcome inspected = run_hcp({"inspect", "checkpoint", run});
        EXPECT_EQ(inspected.status, 0) << inspected.output;
    }
    EXPECT_GT(unfinished, 0U) << "no save was hit";
    const std::string last = step_folders(run, "").back();
    const int done = std::stoi(fs::path(last).filename().string().substr(5));
    const Outcome resumed =
        run_hcp({"train", recipe, "--nproc", "2", "train.steps=" + std::to_string(done + 2)});
    EXPECT_EQ(resumed.status, 0) << resumed.output;
    EXPECT_NE(resumed.output.find("resuming from " + last), std::string::npos) << resumed.output;
    EXPECT_TRUE(step_folders(run, ".tmp").empty());
}

TEST(CheckpointRun, ASecondRunOnTheFolderIsRefused) {
    const ScratchFolder folder;
    const std::string recipe = write_recipe(folder, 100000);
    HcpProcess process({"train", recipe, "--nproc", "2"});
    ASSERT_TRUE(wait_for_step(folder, 1)) << process.output();
    const Outcome second = run_hcp({"train", recipe, "--nproc", "2"});
    EXPECT_EQ(second.status, 2) << second.output;
    EXPECT_EQ(count(second.output, "hcp: "), 1U) << second.output;
    EXPECT_NE(second.output.find("run is in use by another run (process "), std::string::npos)
        << second.output;
    kill(process.pid(), SIGTERM);
    EXPECT_EQ(process.wait(), 0) << process.output();
    const auto folders = step_folders(folder / "run", "");
    ASSERT_EQ(folders.size(), 1U);

    // The folder's lock went with the run; its checkpoint is no model folder, but can be made one.
    const Outcome as_model = run_hcp({"train", recipe, "--nproc", "2", "model.preset=null",
                                      "model.num_layers=null", "model.path=" + folders[0]});
    EXPECT_EQ(as_model.status, 2);
    EXPECT_NE(as_model.output.find("hcp export " + folders[0]), std::string::npos)
        << as_model.output;
    for (const char* dtype : {"fp32", "bf16"}) {
        const std::string model = folder / dtype;
        ASSERT_EQ(run_hcp({"export", folder / "run", model, "--dtype", dtype}).status, 0);
        const Outcome from_model =
            run_hcp({"train", recipe, "--nproc", "2", "model.preset=null", "model.num_layers=null",
                     "model.path=" + model, "train.steps=1", "checkpoint.dir=" + model + "-run"});
        EXPECT_EQ(from_model.status, 0) << from_model.output;
    }
}

TEST(CheckpointRun, InspectAndResumeNameWhatIsDamaged) {
    const ScratchFolder folder;
    const std::string recipe = write_recipe(folder, 2);
    ASSERT_EQ(run_hcp({"train", recipe, "--nproc", "2", "checkpoint.every=1"}).status, 0);
    const std::string run = folder / "run";
    const std::string newest = run + "/step-00000002";
    Outcome outcome = run_hcp({"inspect", "checkpoint", newest});
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    for (const char* text : {"step        2", "dp 1, cp 2, p2p, all_gather", "config.json",
                             "part-00001-of-00002.safetensors", "complete"}) {
        EXPECT_NE(outcome.output.find(text), std::string::npos) << outcome.output;
    }
    flip_byte(newest + "/part-00001-of-00002.safetensors", 1000);
    outcome = run_hcp({"inspect", "checkpoint", run});
    EXPECT_EQ(outcome.status, 1) << outcome.output;
    const std::string damage = newest + "/part-00001-of-00002.safetensors: tensor exp_avg_sq.";
    EXPECT_NE(outcome.output.find(damage), std::string::npos) << outcome.output;
    EXPECT_EQ(count(outcome.output, "DAMAGED"), 1U) << outcome.output;

    outcome = run_hcp({"train", recipe, "--nproc", "2", "checkpoint.resume=" + newest});
    EXPECT_EQ(outcome.status, 2) << outcome.output;
    EXPECT_NE(outcome.output.find("hcp: checkpoint.resume: " + damage), std::string::npos)
        << outcome.output;
    const Outcome exported = run_hcp({"export", run, folder / "model"});
    EXPECT_EQ(exported.status, 0) << exported.output;
    EXPECT_NE(exported.output.find(run + "/step-00000001 -> "), std::string::npos)
        << exported.output;
    const Outcome resumed = run_hcp({"train", recipe, "--nproc", "2"});
    EXPECT_EQ(resumed.status, 0) << resumed.output;
    EXPECT_NE(resumed.output.find("skipped a checkpoint: " + damage), std::string::npos)
        << resumed.output;
    EXPECT_NE(resumed.output.find("1 other checkpoint in "), std::string::npos) << resumed.output;
    EXPECT_EQ(run_hcp({"inspect", "checkpoint", run}).status, 0) << "it has been replaced";
    EXPECT_EQ(run_hcp({"export", run, newest}).status, 2) << "a checkpoint is no place for a model";
    for (const char* step : {"/step-00000001", "/step-00000002"}) {
        flip_byte(run + step + "/state.json", 3);
    }
    const Outcome refused = run_hcp({"train", recipe, "--nproc", "2"});
    EXPECT_EQ(refused.status, 2) << refused.output;
    EXPECT_NE(refused.output.find("none of its checkpoints can be loaded"), std::string::npos)
        << refused.output;
    EXPECT_EQ(run_hcp({"inspect", "checkpoint", folder / "nothing"}).status, 2);
}

}  // namespace
}  // namespace hybridcp::testing
