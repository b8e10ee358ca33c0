// The recorded 30-step runs (golden/README.md 5), dense and with experts, with their bars
// (section 8), on meshes of ranks with whole and with sharded parameters.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "mesh_threads.h"
#include "model/safetensors.h"
#include "train/trained_model.h"

namespace hybridcp {
namespace {

constexpr std::int64_t kSteps = 30, kRows = 2, kLength = 256;

struct Run {
    std::vector<double> losses, ce_losses, aux_losses, norms;
    std::map<std::string, at::Tensor> parameters;
};

struct Way {
    int dp = 1;
    int cp = 1;
    LinearAttentionMode mode = LinearAttentionMode::kP2p;
    int shard_size = 0;  // 0: whole parameters
};

void train(const std::string& name, const Mesh& mesh, const Way& way, Run& run) {
    const std::string golden = HCP_GOLDEN_DIR;
    const std::string folder = golden + "/models/" + name;
    const ModelConfig config =
        read_model_config(folder);  // the run's weight of the aux loss is its
    const auto source = stored_parameters(folder, config);
    TrainedModel trained({.config = config, .sharded = way.shard_size > 0}, *source, mesh);
    const at::Tensor tokens =
        SafetensorsFile(golden + "/trajectories/" + name + "/tokens.safetensors")
            .read("tokens")
            .to(at::kLong);
    const Parallel parallel{.dp = mesh.dp->size(),
                            .cp = mesh.cp->size(),
                            .linear_attention_mode = way.mode,
                            .full_attention_mode = FullAttentionMode::kAllGather};
    const std::int64_t rows_per_rank = kRows / mesh.dp->size();
    for (std::int64_t step = 0; step < kSteps; ++step) {
        const std::int64_t first =
            step * kRows * kLength + mesh.dp->rank() * rows_per_rank * kLength;
        const auto rows = [&](std::int64_t begin) {
            return tokens.narrow(0, begin, rows_per_rank * kLength)
                .reshape({rows_per_rank, kLength});
        };
        const StepLoss loss =
            trained.forward_backward({batch_from_rows(rows(first), rows(first + 1))}, parallel);
        run.losses.push_back(loss.loss);
        run.ce_losses.push_back(loss.ce_loss);
        run.aux_losses.push_back(loss.aux_loss.value_or(0.0));
        run.norms.push_back(trained.update(
            learning_rate_at({.learning_rate = 1e-3, .steps = kSteps, .warmup_steps = 5}, step),
            1.0));
    }
    trained.for_each_parameter([&](const NamedParameter& parameter) {
        run.parameters[parameter.name] = parameter.value.detach().clone();
    });
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
    for (const ParameterShape& shape : parameter_shapes(config)) {
        const at::Tensor expected = final.read(shape.name).to(at::kDouble);
        const double off = (run.parameters.at(shape.name) - expected).norm().item<double>();
        const double way = (expected - start.read(shape.name)).norm().item<double>();
        EXPECT_LT(off, 1e-2 * way) << shape.name;
        error += off * off;
        moved += way * way;
    }
    EXPECT_LT(std::sqrt(error), 1e-3 * std::sqrt(moved));
}

void run_golden(const std::string& name, const Way& way) {
    std::vector<Run> runs(static_cast<std::size_t>(way.dp * way.cp));
    testing::run_mesh(
        way.dp, way.cp,
        [&](const Mesh& mesh) {
            train(name, mesh, way, runs[static_cast<std::size_t>(mesh.world->rank())]);
        },
        std::max(way.shard_size, 1));
    expect_golden(name, runs.front());
    for (const Run& run : runs) {
        EXPECT_EQ(run.losses, runs.front().losses);
        for (const auto& [parameter, value] : run.parameters) {
            EXPECT_TRUE(at::equal(value, runs.front().parameters.at(parameter))) << parameter;
        }
    }
}

class Trajectory : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Models, Trajectory, ::testing::Values("dense_tiny", "moe_tiny"));

TEST_P(Trajectory, OneRank) {
    run_golden(GetParam(), {.mode = LinearAttentionMode::kUlysses});
}
TEST_P(Trajectory, FourContextParallelRanks) {
    run_golden(GetParam(), {.cp = 4});
}
TEST_P(Trajectory, FourContextParallelRanksSharded) {
    run_golden(GetParam(), {.cp = 4, .mode = LinearAttentionMode::kScan, .shard_size = 4});
}
TEST_P(Trajectory, TwoByTwo) {
    run_golden(GetParam(), {.dp = 2, .cp = 2, .mode = LinearAttentionMode::kAllGather});
}
TEST_P(Trajectory, TwoByTwoSharded) {
    run_golden(GetParam(), {.dp = 2, .cp = 2, .shard_size = 4});
}
TEST_P(Trajectory, TwoByTwoShardedInPairs) {
    run_golden(GetParam(), {.dp = 2, .cp = 2, .shard_size = 2});
}
TEST_P(Trajectory, ThreeRanksSharded) {
    run_golden(GetParam(), {.cp = 3, .mode = LinearAttentionMode::kGatherHidden, .shard_size = 3});
}

}  // namespace
}  // namespace hybridcp
