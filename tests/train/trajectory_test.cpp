// The recorded 30-step runs (golden/README.md 5), dense and with experts, with their bars
// (section 8), on one rank and on four.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "mesh_threads.h"
#include "model/safetensors.h"
#include "train/optimizer.h"
#include "train/step.h"

namespace hybridcp {
namespace {

constexpr std::int64_t kSteps = 30, kRows = 2, kLength = 256;

struct Run {
    std::vector<double> losses, ce_losses, aux_losses, norms;
    std::vector<at::Tensor> parameters;
};

void train(const std::string& name, const Mesh& mesh, LinearAttentionMode mode, Run& run) {
    const std::string golden = HCP_GOLDEN_DIR;
    const std::string folder = golden + "/models/" + name;
    const ModelConfig config =
        read_model_config(folder);  // the run's weight of the aux loss is its
    const HybridModel model(config, load_parameters(folder, config, at::kCPU), at::kFloat);
    const at::Tensor tokens =
        SafetensorsFile(golden + "/trajectories/" + name + "/tokens.safetensors")
            .read("tokens")
            .to(at::kLong);
    AdamW optimizer(whole_pieces(model.parameters()), {});
    const Parallel parallel{.dp = mesh.dp->size(),
                            .cp = mesh.cp->size(),
                            .linear_attention_mode = mode,
                            .full_attention_mode = FullAttentionMode::kAllGather};
    const std::int64_t rows_per_rank = kRows / mesh.dp->size();
    for (std::int64_t step = 0; step < kSteps; ++step) {
        const std::int64_t first =
            step * kRows * kLength + mesh.dp->rank() * rows_per_rank * kLength;
        const auto rows = [&](std::int64_t begin) {
            return tokens.narrow(0, begin, rows_per_rank * kLength)
                .reshape({rows_per_rank, kLength});
        };
        const StepLoss loss = forward_backward(
            model, {batch_from_rows(rows(first), rows(first + 1))}, parallel, mesh);
        run.losses.push_back(loss.loss);
        run.ce_losses.push_back(loss.ce_loss);
        run.aux_losses.push_back(loss.aux_loss.value_or(0.0));
        run.norms.push_back(clip_gradients(optimizer.pieces(), 1.0));
        optimizer.step(
            learning_rate_at({.learning_rate = 1e-3, .steps = kSteps, .warmup_steps = 5}, step));
    }
    for (const NamedParameter& parameter : model.parameters()) {
        run.parameters.push_back(parameter.value.detach());
    }
}

void expect_losses(const std::vector<double>& losses, const at::Tensor& expected) {
    ASSERT_EQ(losses.size(), 30U);
    for (std::int64_t step = 0; step < kSteps; ++step) {
        EXPECT_NEAR(losses[static_cast<std::size_t>(step)], expected[step].item<double>(), 2e-5)
            << "step " << step;
    }
}

void expect_golden(const std::string& name, const Run& run) {
    const std::string folder = std::string(HCP_GOLDEN_DIR) + "/trajectories/" + name;
    const SafetensorsFile trace(folder + "/trace.safetensors");
    const SafetensorsFile final(folder + "/final.safetensors");
    const std::string model_folder = std::string(HCP_GOLDEN_DIR) + "/models/" + name;
    const SafetensorsFile start(model_folder + "/model.safetensors");
    const at::Tensor norms = trace.read("grad_norm").to(at::kDouble);
    expect_losses(run.losses, trace.read("loss"));
    expect_losses(run.ce_losses, trace.read("ce_loss"));
    expect_losses(run.aux_losses, trace.read("aux_loss"));
    for (std::int64_t step = 0; step < kSteps; ++step) {
        const double norm = norms[step].item<double>();
        EXPECT_NEAR(run.norms[static_cast<std::size_t>(step)], norm, 1e-3 * norm)
            << "step " << step;
    }
    const ModelConfig config = read_model_config(model_folder);
    double error = 0, moved = 0;
    const auto shapes = parameter_shapes(config);
    for (std::size_t i = 0; i < shapes.size(); ++i) {
        const at::Tensor expected = final.read(shapes[i].name).to(at::kDouble);
        const double off = (run.parameters[i] - expected).norm().item<double>();
        const double way = (expected - start.read(shapes[i].name)).norm().item<double>();
        EXPECT_LT(off, 1e-2 * way) << shapes[i].name;
        error += off * off;
        moved += way * way;
    }
    EXPECT_LT(std::sqrt(error), 1e-3 * std::sqrt(moved));
}

void run_golden(const std::string& name, int dp, int cp, LinearAttentionMode mode) {
    std::vector<Run> runs(static_cast<std::size_t>(dp * cp));
    testing::run_mesh(dp, cp, [&](const Mesh& mesh) {
        train(name, mesh, mode, runs[static_cast<std::size_t>(mesh.world->rank())]);
    });
    expect_golden(name, runs.front());
    for (const Run& run : runs) {
        EXPECT_EQ(run.losses, runs.front().losses);
        for (std::size_t i = 0; i < run.parameters.size(); ++i) {
            EXPECT_TRUE(at::equal(run.parameters[i], runs.front().parameters[i])) << i;
        }
    }
}

class Trajectory : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Models, Trajectory, ::testing::Values("dense_tiny", "moe_tiny"));

TEST_P(Trajectory, OneRank) {
    run_golden(GetParam(), 1, 1, LinearAttentionMode::kUlysses);
}
TEST_P(Trajectory, FourContextParallelRanks) {
    run_golden(GetParam(), 1, 4, LinearAttentionMode::kP2p);
}
TEST_P(Trajectory, TwoByTwo) {
    run_golden(GetParam(), 2, 2, LinearAttentionMode::kAllGather);
}

}  // namespace
}  // namespace hybridcp
