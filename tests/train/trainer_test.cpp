// Whole runs: they learn, log, stop, resume bit by bit, and report errors on every rank.
#include "train/trainer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <sstream>

#include <nlohmann/json.hpp>

#include "core/files.h"
#include "hybridcp/error.h"
#include "hybridcp/model.h"
#include "mesh_threads.h"

namespace hybridcp {
namespace {

namespace fs = std::filesystem;
using testing::message_of;
using testing::run_mesh;
using testing::TemporaryFolder;

std::string some_text() {
    std::string text;
    for (int i = 0; i < 300; ++i) {
        text += fmt::format("line {} of a text that repeats itself, {} times\n", i, i % 7);
    }
    return text;
}

/// A run of `steps` updates of the small golden model on rows of 48 tokens.
Recipe make_recipe(const TemporaryFolder& folder, int dp, int cp) {
    Recipe recipe = parse_recipe(
        "model: {dtype: fp32}\n"
        "data: {sequence_length: 48}\n"
        "train:\n"
        "  steps: 6\n"
        "  optimizer: {lr: 3e-3}\n"
        "  schedule: {warmup_steps: 2}\n"
        "  accelerator: {linear_attention_cp_mode: p2p, full_attention_cp_mode: all_gather}\n"
        "checkpoint: {every: 2, keep: 2, dir: unset}\n",
        "test",
        {"model.path=" + std::string(HCP_GOLDEN_DIR) + "/models/dense_tiny",
         "data.path=" + folder.write("text.txt", some_text()),
         fmt::format("train.accelerator.dp={}", dp), fmt::format("train.accelerator.cp={}", cp)});
    recipe.checkpoint.dir = folder / "run";
    recipe.log.dir = folder / "run";
    return recipe;
}

/// Loss and gradient norm of each step, and rank 0's report.
struct Outcome {
    std::vector<std::pair<double, double>> steps;
    TrainReport report;
    std::string output;
};

Outcome train(const Recipe& recipe,
              const std::atomic<bool>* stop = nullptr,
              const std::function<void(const StepMetrics&)>& on_step = nullptr) {
    Outcome outcome;
    std::ostringstream out;
    run_mesh(recipe.train.accelerator.dp, recipe.train.accelerator.cp, [&](const Mesh& mesh) {
        const bool first = mesh.world->rank() == 0;
        const TrainReport report =
            run_training(recipe, mesh,
                         {.stop = stop,
                          .out = first ? &out : nullptr,
                          .on_step = [&](const StepMetrics& metrics) {
                              if (first) {
                                  outcome.steps.emplace_back(metrics.loss, metrics.grad_norm);
                                  if (on_step) {
                                      on_step(metrics);
                                  }
                              }
                          }});
        if (first) {
            outcome.report = report;
        }
    });
    outcome.output = out.str();
    return outcome;
}

std::vector<nlohmann::json> read_lines(const std::string& path) {
    std::istringstream stream(read_file(path));
    std::vector<nlohmann::json> lines;
    for (std::string line; std::getline(stream, line);) {
        lines.push_back(nlohmann::json::parse(line));
    }
    return lines;
}

// Two ranks evaluate three rows, so one has a micro-batch less.
TEST(Trainer, ExpertsLogBothLosses) {
    const TemporaryFolder folder;
    Recipe recipe = make_recipe(folder, 2, 1);
    recipe.model = {.path = std::nullopt, .preset = "tiny-moe", .dtype = "fp32"};
    recipe.model.router_aux_loss_coef = 0.25;
    recipe.train.eval_every = 3;
    recipe.data.validation_path = {folder.write("short.txt", some_text().substr(0, 140))};
    const Outcome outcome = train(recipe);
    const auto lines = read_lines(outcome.report.metrics_path);
    ASSERT_EQ(lines.size(), 6U);
    for (const auto& line : lines) {
        const double ce_loss = line.at("ce_loss"), aux_loss = line.at("aux_loss");
        EXPECT_NEAR(line.at("loss").get<double>(), ce_loss + 0.25 * aux_loss, 1e-12);
        EXPECT_NEAR(line.at("bits_per_byte").get<double>(), ce_loss / std::log(2.0), 1e-12);
        EXPECT_GT(aux_loss, 1.99);  // two experts a token
        EXPECT_EQ(line.contains("validation_loss"), line.at("step").get<int>() % 3 == 0);
    }
    EXPECT_EQ(outcome.report.first_loss, lines.front().at("ce_loss").get<double>());
    EXPECT_LT(outcome.report.last_loss, outcome.report.first_loss);
    const ModelConfig saved = read_model_config(outcome.report.checkpoint_folder);
    EXPECT_EQ(saved.num_experts, 8);
    EXPECT_EQ(saved.router_aux_loss_coef, 0.25);
}

// The m-th micro-batches of all dp ranks are one for the load-balancing loss.
TEST(Trainer, ExpertsGiveTheSameCurveOnDataParallelRanks) {
    const auto curve = [](int dp, int cp, std::int64_t micro_batch_size) {
        const TemporaryFolder folder;
        Recipe recipe = make_recipe(folder, dp, cp);
        recipe.model = {.path = std::nullopt, .preset = "tiny-moe", .dtype = "fp32"};
        recipe.model.router_aux_loss_coef = 1.0;
        recipe.train.steps = 3;
        recipe.train.micro_batch_size = micro_batch_size;
        return train(recipe).steps;
    };
    const auto one = curve(1, 1, 2);
    for (const auto& ranks : {curve(2, 1, 1), curve(2, 2, 1), curve(1, 2, 2)}) {
        ASSERT_EQ(ranks.size(), one.size());
        for (std::size_t step = 0; step < one.size(); ++step) {
            EXPECT_NEAR(ranks[step].first, one[step].first, 2e-6 * one[step].first);
            EXPECT_NEAR(ranks[step].second, one[step].second, 2e-5 * one[step].second);
        }
    }
}

TEST(Trainer, ActivationCheckpointingChangesNoBit) {
    const auto curve = [](const std::string& checkpoint) {
        const TemporaryFolder folder;
        Recipe recipe = make_recipe(folder, 1, 2);
        recipe.train.activation_checkpoint = checkpoint;
        recipe.train.eval_every = 3;
        recipe.data.validation_path = recipe.data.path;
        return train(recipe).steps;
    };
    const auto none = curve("none");
    EXPECT_EQ(curve("full"), none);
    EXPECT_EQ(curve("selective"), none);
}

TEST(Trainer, LearnsLogsAndSaves) {
    const TemporaryFolder folder;
    Recipe recipe = make_recipe(folder, 1, 1);
    recipe.train.steps = 12;
    recipe.train.eval_every = 5;
    recipe.data.validation_path = recipe.data.path;
    const Outcome outcome = train(recipe);
    EXPECT_EQ(outcome.report.last_step, 12);
    EXPECT_LT(outcome.report.last_loss, 0.8 * outcome.report.first_loss);
    EXPECT_TRUE(outcome.report.is_bytes);
    EXPECT_GT(outcome.report.tokens_per_second, 0.0);
    EXPECT_EQ(outcome.report.checkpoint_folder, folder / "run/step-00000012");
    EXPECT_TRUE(fs::exists(folder / "run/step-00000010"));
    EXPECT_FALSE(fs::exists(folder / "run/step-00000008"));

    const auto lines = read_lines(outcome.report.metrics_path);
    ASSERT_EQ(lines.size(), 12U);
    EXPECT_EQ(lines[4].at("step"), 5);
    EXPECT_EQ(lines[4].at("loss").get<double>(), outcome.steps[4].first);
    EXPECT_NEAR(lines[4].at("bits_per_byte").get<double>(), outcome.steps[4].first / std::log(2.0),
                1e-12);
    EXPECT_EQ(lines[4].at("tokens"), 4 * 48);
    EXPECT_TRUE(lines[4].contains("validation_loss"));
    EXPECT_FALSE(lines[5].contains("validation_loss"));
    EXPECT_NEAR(lines[0].at("learning_rate").get<double>(), 1.5e-3, 1e-12);
    EXPECT_GT(lines[0].at("memory").at("peak_bytes").get<std::int64_t>(), 1 << 20);
    const auto& tensors = lines[0].at("memory").at("tensors");  // of the first step alone
    EXPECT_FALSE(lines[1].at("memory").contains("tensors"));
    std::int64_t sum = 0;
    for (const auto& bytes : tensors.at("at_peak_bytes")) {
        sum += bytes.get<std::int64_t>();
    }
    EXPECT_EQ(sum, tensors.at("peak_bytes"));
    EXPECT_GT(tensors.at("class_peak_bytes").at("optimizer").get<std::int64_t>(), 1 << 20);
    EXPECT_NE(outcome.output.find("memory of tensors in the first step: "), std::string::npos);
    EXPECT_NE(read_file(outcome.report.picture_path).find("validation"), std::string::npos);
    EXPECT_NE(outcome.output.find("step 12/12  loss "), std::string::npos) << outcome.output;
}

TEST(Trainer, SplitsGiveTheSameCurve) {
    const TemporaryFolder folder;
    Recipe recipe = make_recipe(folder, 1, 1);
    recipe.checkpoint.dir.reset();
    const Outcome one = train(recipe);
    recipe.train.micro_batch_size = 2;
    recipe.train.accelerator.dp = 2;
    recipe.train.accelerator.cp = 2;
    const Outcome four = train(recipe);
    ASSERT_EQ(one.steps.size(), four.steps.size());
    for (std::size_t i = 0; i < one.steps.size(); ++i) {
        EXPECT_NEAR(four.steps[i].first, one.steps[i].first, 1e-5 * one.steps[i].first);
        EXPECT_NEAR(four.steps[i].second, one.steps[i].second, 1e-4 * one.steps[i].second);
    }
    const auto lines = read_lines(four.report.metrics_path);
    EXPECT_GT(lines[0].at("comm").at("gradients").at("bytes").get<std::int64_t>(), 0);
    EXPECT_DOUBLE_EQ(lines[0].at("tokens_per_second").get<double>(),
                     4 * lines[0].at("tokens_per_second_per_rank").get<double>());
}

void expect_resumed_like_one_run(int dp, int cp, const std::string& dtype) {
    const TemporaryFolder folder;
    Recipe recipe = make_recipe(folder, dp, cp);
    recipe.model.dtype = dtype;
    const Outcome whole = train(recipe);
    ASSERT_EQ(whole.steps.size(), 6U);

    recipe.checkpoint.dir = folder / "stopped";
    recipe.log.dir = folder / "stopped";
    recipe.checkpoint.every = 0;
    std::atomic<bool> stop = false;
    const Outcome first =
        train(recipe, &stop, [&](const StepMetrics& metrics) { stop = metrics.step == 3; });
    EXPECT_TRUE(first.report.stopped_early);
    EXPECT_EQ(first.report.last_step, 3);
    std::ofstream(first.report.metrics_path, std::ios::app)
        << "{\"step\": 4, \"loss\": 9.0}\n{\"step\": 5, \"lo";  // a run that got further, then died
    const Outcome second = train(recipe);
    EXPECT_EQ(second.report.first_step, 3);
    EXPECT_FALSE(second.report.stopped_early);
    auto steps = first.steps;
    steps.insert(steps.end(), second.steps.begin(), second.steps.end());
    EXPECT_EQ(steps, whole.steps);  // bit by bit
    const auto lines = read_lines(second.report.metrics_path);
    ASSERT_EQ(lines.size(), 6U);
    EXPECT_EQ(lines[3].at("loss").get<double>(), whole.steps[3].first);
    for (const auto& entry : fs::directory_iterator(folder / "run/step-00000006")) {
        const std::string name = entry.path().filename();
        if (name.starts_with("part-")) {
            EXPECT_EQ(read_file(folder / "stopped/step-00000006/" + name), read_file(entry.path()));
        }
    }

    const Outcome again = train(recipe);  // nothing is left to do
    EXPECT_TRUE(again.steps.empty());
    EXPECT_EQ(again.report.checkpoint_folder, folder / "stopped/step-00000006");
}

TEST(Trainer, ResumesBitByBitOnOneRank) {
    expect_resumed_like_one_run(1, 1, "fp32");
}
TEST(Trainer, ResumesBitByBitOnFourRanksInBf16) {
    expect_resumed_like_one_run(2, 2, "bf16");
}

TEST(Trainer, ResumeNeverStartsAnewAndAFolderIsTakenAsGiven) {
    const TemporaryFolder folder;
    Recipe recipe = make_recipe(folder, 1, 1);
    const Outcome whole = train(recipe);
    recipe.checkpoint.resume = "never";
    const Outcome anew = train(recipe);
    EXPECT_EQ(anew.steps, whole.steps);
    EXPECT_TRUE(fs::exists(folder / "run/replaced-step-00000006"));
    recipe.checkpoint.resume = folder / "run/step-00000004";
    const Outcome last = train(recipe);
    EXPECT_EQ(last.report.first_step, 4);
    EXPECT_EQ(last.steps.back(), whole.steps.back());
    recipe.checkpoint.resume = folder / "nowhere";
    EXPECT_NE(message_of([&] { (void)train(recipe); }).find("checkpoint.resume: "),
              std::string::npos);
}

TEST(Trainer, ErrorsReachEveryRank) {
    const TemporaryFolder folder;
    Recipe recipe = make_recipe(folder, 1, 2);
    recipe.log.dir = folder.write("file", "x") + "/run";
    std::vector<std::string> messages(2);
    const auto run = [&] {
        run_mesh(1, 2, [&](const Mesh& mesh) {
            messages[static_cast<std::size_t>(mesh.world->rank())] =
                message_of([&] { (void)run_training(recipe, mesh); });
        });
    };
    run();
    EXPECT_NE(messages[0].find("log.dir: cannot create"), std::string::npos) << messages[0];
    EXPECT_EQ(messages[0], messages[1]);

    recipe = make_recipe(folder, 1, 2);
    recipe.train.optimizer.lr = 1e30;
    recipe.train.schedule.warmup_steps = 0;
    run();
    EXPECT_EQ(messages[0], messages[1]);
    EXPECT_TRUE(messages[0].starts_with("step 2: the loss is ")) << messages[0];

    recipe = make_recipe(folder, 1, 2);
    recipe.train.accelerator.linear_attention_gdn_backend = "triton";
    run();
    EXPECT_NE(messages[0].find("fused"), std::string::npos) << messages[0];
    EXPECT_EQ(messages[0], messages[1]);
}

}  // namespace
}  // namespace hybridcp
