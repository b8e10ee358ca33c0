// Training with sharded parameters gives what whole parameters give, whatever the mesh.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "hybridcp/error.h"
#include "mesh_threads.h"
#include "train/tensor_memory.h"
#include "train/trained_model.h"

namespace hybridcp {
namespace {

constexpr std::int64_t kRows = 4;
constexpr double kLearningRate = 1e-3;

struct Case {
    std::string name;
    int dp = 1;
    int cp = 1;
    int shard_size = 1;  // 0: not sharded
    LinearAttentionMode linear_mode = LinearAttentionMode::kP2p;
    FullAttentionMode full_mode = FullAttentionMode::kAllGather;
    bool prefetch = true;
};

/// Packed documents of uneven lengths, one and zero tokens among them.
TokenBatch make_batch(std::int64_t seed) {
    TokenBatch batch;
    batch.document_lengths = {23 + seed, 1, 0, 18};
    std::int64_t num_tokens = 0;
    for (const std::int64_t length : batch.document_lengths) {
        num_tokens += length;
    }
    batch.token_ids = (at::arange(num_tokens, at::kLong) * (37 + seed) + seed * 11) % 256;
    batch.targets = (batch.token_ids * 3 + 5) % 256;
    batch.targets[0] = -100;
    return batch;
}

struct Outcome {
    std::vector<double> losses, norms;
    std::map<std::string, at::Tensor> start, parameters;
};

std::map<std::string, at::Tensor> copy_parameters(TrainedModel& trained) {
    std::map<std::string, at::Tensor> copies;
    trained.for_each_parameter([&](const NamedParameter& parameter) {
        copies[parameter.name] = parameter.value.detach().to(at::kDouble, false, /*copy=*/true);
    });
    return copies;
}

ModelConfig make_config(const std::string& preset, bool tied) {
    ModelConfig config = preset_model_config(preset);
    config.tie_word_embeddings = tied;
    return config;
}

/// Three steps of four rows in uneven micro-batches: dp rank 0 has the odd one more.
Outcome train(const Case& test, const ModelConfig& config, at::ScalarType dtype, const Mesh& mesh) {
    const auto source = random_parameters(config, 5);
    TrainedModel trained({.config = config,
                          .compute_dtype = dtype,
                          .sharded = test.shard_size > 0,
                          .prefetch = test.prefetch},
                         *source, mesh);
    const Parallel parallel{.dp = test.dp,
                            .cp = test.cp,
                            .linear_attention_mode = test.linear_mode,
                            .full_attention_mode = test.full_mode};
    Outcome outcome{.losses = {}, .norms = {}, .start = copy_parameters(trained), .parameters = {}};
    for (std::int64_t step = 0; step < 3; ++step) {
        std::vector<TokenBatch> batches;
        for (std::int64_t row = mesh.dp->rank(); row < kRows - 1; row += test.dp) {
            batches.push_back(make_batch(step * kRows + row));
        }
        outcome.losses.push_back(trained.forward_backward(batches, parallel).loss);
        outcome.norms.push_back(trained.update(kLearningRate, 1.0));
        (void)trained.forward_only(batches, parallel);
    }
    outcome.parameters = copy_parameters(trained);
    return outcome;
}

Outcome run(const Case& test, const ModelConfig& config, at::ScalarType dtype = at::kFloat) {
    std::vector<Outcome> outcomes(static_cast<std::size_t>(test.dp * test.cp));
    testing::run_mesh(
        test.dp, test.cp,
        [&](const Mesh& mesh) {
            outcomes[static_cast<std::size_t>(mesh.world->rank())] =
                train(test, config, dtype, mesh);
        },
        std::max(test.shard_size, 1));
    for (const Outcome& outcome : outcomes) {
        EXPECT_EQ(outcome.losses, outcomes.front().losses);
        EXPECT_EQ(outcome.norms, outcomes.front().norms);
    }
    return outcomes.front();
}

void expect_close(const Outcome& actual, const Outcome& expected, double bar) {
    for (std::size_t i = 0; i < expected.losses.size(); ++i) {
        EXPECT_NEAR(actual.losses[i], expected.losses[i], bar * expected.losses[i]) << i;
        EXPECT_NEAR(actual.norms[i], expected.norms[i], bar * expected.norms[i]) << i;
    }
    // As golden trajectories are judged: against the way that the parameters went.
    ASSERT_EQ(actual.parameters.size(), expected.parameters.size());
    double error = 0, moved = 0;
    for (const auto& [name, value] : actual.parameters) {
        const at::Tensor& end = expected.parameters.at(name);
        const double off = (value - end).norm().item<double>();
        const double way = (end - expected.start.at(name)).norm().item<double>();
        EXPECT_LT(off, std::min(1e3 * bar, 0.5) * way) << name;
        error += off * off;
        moved += way * way;
    }
    EXPECT_LT(std::sqrt(error), 1e2 * bar * std::sqrt(moved));
}

class Sharding : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(
    Meshes,
    Sharding,
    ::testing::Values(
        Case{.name = "OneRank", .shard_size = 1},
        Case{.name = "Cp4", .cp = 4, .shard_size = 4},
        Case{.name = "Cp3Scan",
             .cp = 3,
             .shard_size = 3,
             .linear_mode = LinearAttentionMode::kScan,
             .full_mode = FullAttentionMode::kRing},
        Case{.name = "Dp2Cp2", .dp = 2, .cp = 2, .shard_size = 4},
        Case{.name = "Dp2Cp2Hybrid", .dp = 2, .cp = 2, .shard_size = 2},
        Case{.name = "Dp4", .dp = 4, .shard_size = 4},
        Case{.name = "Dp4HybridNoPrefetch", .dp = 4, .shard_size = 2, .prefetch = false},
        Case{.name = "Cp2Ulysses",
             .cp = 2,
             .shard_size = 2,
             .linear_mode = LinearAttentionMode::kUlysses,
             .full_mode = FullAttentionMode::kUlysses},
        Case{.name = "Cp2GatherHidden",
             .cp = 2,
             .shard_size = 2,
             .linear_mode = LinearAttentionMode::kGatherHidden},
        Case{.name = "Cp8", .cp = 8, .shard_size = 8}),
    [](const auto& each) { return each.param.name; });

TEST_P(Sharding, DenseInFp32AgreesWithOneRank) {
    const ModelConfig config = make_config("tiny", false);
    expect_close(run(GetParam(), config), run({.name = "Whole", .shard_size = 0}, config), 1e-5);
}

TEST_P(Sharding, TiedInBf16AgreesWithWholeParameters) {
    const ModelConfig config = make_config("tiny", true);
    Case whole = GetParam();
    whole.shard_size = 0;
    // The same mesh and the same roundings: what differs is the order of fp32 sums.
    expect_close(run(GetParam(), config, at::kBFloat16), run(whole, config, at::kBFloat16), 2e-3);
}

TEST_P(Sharding, ExpertsInFp32AgreeWithWholeParameters) {
    const ModelConfig config = make_config("tiny-moe", false);
    Case whole = GetParam();
    whole.shard_size = 0;
    expect_close(run(GetParam(), config), run(whole, config), 1e-5);
}

TEST(HybridSharding, ReplicasHaveTheSameBitsAfterEveryStep) {
    const ModelConfig config = make_config("tiny", false);
    testing::run_mesh(
        2, 3,
        [&](const Mesh& mesh) {
            const auto source = random_parameters(config, 5);
            TrainedModel trained({.config = config, .sharded = true}, *source, mesh);
            const Parallel parallel{.dp = 2,
                                    .cp = 3,
                                    .linear_attention_mode = LinearAttentionMode::kP2p,
                                    .full_attention_mode = FullAttentionMode::kAllGather};
            for (std::int64_t step = 0; step < 3; ++step) {
                (void)trained.forward_backward({make_batch(step * 2 + mesh.dp->rank())}, parallel);
                (void)trained.update(kLearningRate, 1.0);
                for (const ParameterPiece& piece : trained.pieces()) {
                    const at::Tensor all = mesh.replicas->all_gather("test", piece.value);
                    EXPECT_TRUE(at::equal(all[0], all[1])) << piece.name;
                }
            }
        },
        3);
}

/// docs/cost-model.md, sharded parameters.
class ShardedTraffic : public ::testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(Heads, ShardedTraffic, ::testing::Bool(), [](const auto& each) {
    return each.param ? "Tied" : "Untied";
});

TEST_P(ShardedTraffic, IsThatOfTheCostModel) {
    const bool is_tied = GetParam();
    const ModelConfig config = make_config("tiny", is_tied);
    constexpr int kRanks = 4;
    testing::run_mesh(
        1, kRanks,
        [&](const Mesh& mesh) {
            const auto source = random_parameters(config, 5);
            TrainedModel trained(
                {.config = config, .compute_dtype = at::kBFloat16, .sharded = true}, *source, mesh);
            const Parallel parallel{.cp = kRanks,
                                    .linear_attention_mode = LinearAttentionMode::kP2p,
                                    .full_attention_mode = FullAttentionMode::kAllGather};
            std::int64_t parts = 0, gathered = 0;  // elements of all units; bytes of one pass
            for (const FlatShard* shard : trained.shards()->flat_shards()) {
                const std::int64_t numel = shard->values().numel();
                const auto element =
                    static_cast<std::int64_t>(shard->leaves().front().value.element_size());
                const std::string& first = shard->leaves().front().name;
                const bool once = (first == "model.embed_tokens.weight" && !is_tied) ||
                                  first == "lm_head.weight" || first == "model.norm.weight";
                parts += numel;
                gathered += (once ? 1 : 2) * numel * element;
            }
            mesh.reset_recorders();
            (void)trained.forward_backward({make_batch(1), make_batch(2)}, parallel);
            const auto traffic = mesh.traffic();
            EXPECT_EQ(traffic.at("parameter_gather").bytes, 2 * (kRanks - 1) * gathered);
            EXPECT_EQ(traffic.at("gradient_scatter").bytes, 2 * (kRanks - 1) * 4 * parts);
            EXPECT_EQ(traffic.count("gradients"), 0U);
        },
        kRanks);
}

TEST(ShardedMemory, StateFallsWithTheNumberOfRanks) {
    const ModelConfig config = make_config("tiny", false);
    for (const int num_ranks : {1, 2, 4}) {
        std::int64_t numel = 0;
        for (const ParameterShape& parameter : parameter_shapes(config)) {
            numel += at::empty(parameter.shape, at::device(at::kMeta)).numel();
        }
        testing::run_mesh(
            1, num_ranks,
            [&](const Mesh& mesh) {
                const auto source = random_parameters(config, 5);
                const TensorMemory memory;
                const TrainedModel trained({.config = config, .sharded = true}, *source, mesh);
                // Value, gradient and two moments in fp32.
                const auto expected = static_cast<double>(16 * numel) / num_ranks;
                EXPECT_NEAR(static_cast<double>(memory.live_bytes()), expected, 0.02 * expected);
            },
            num_ranks);
    }
}

}  // namespace
}  // namespace hybridcp
