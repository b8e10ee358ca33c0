// The load-balancing loss and its gradient do not depend on how tokens are split over ranks.
#include "train/router_balance.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "mesh_threads.h"
#include "train/step.h"

namespace hybridcp {
namespace {

using testing::run_mesh;

const std::string kModelFolder = std::string(HCP_GOLDEN_DIR) + "/models/moe_tiny";

/// The coefficient is large, so that its gradient shows beside that of the cross-entropy.
HybridModel load_model(double coefficient = 0.5) {
    ModelConfig config = read_model_config(kModelFolder);
    config.router_aux_loss_coef = coefficient;
    return HybridModel(config, load_parameters(kModelFolder, config, at::kCPU), at::kFloat);
}

TokenBatch make_rows(const std::vector<std::int64_t>& rows) {
    TokenBatch batch;
    std::vector<std::int64_t> ids, targets;
    for (const std::int64_t row : rows) {
        for (const std::int64_t length : {19 + 3 * row, std::int64_t{1}, std::int64_t{12}}) {
            batch.document_lengths.push_back(length);
            for (std::int64_t i = 0; i < length; ++i) {
                ids.push_back((row * 131 + length * 31 + i * i * 7) % 512);
                targets.push_back(i + 1 == length || i % 5 == 0 ? -100 : (ids.back() * 3) % 512);
            }
        }
    }
    batch.token_ids = at::tensor(ids, at::kLong);
    batch.targets = at::tensor(targets, at::kLong);
    return batch;
}

/// rows[rank of dp][micro-batch]
using Rows = std::vector<std::vector<std::vector<std::int64_t>>>;

struct Outcome {
    StepLoss loss;
    std::vector<at::Tensor> grads;
};

std::vector<Outcome> run(const Rows& rows, int cp, double coefficient = 0.5) {
    const int dp = static_cast<int>(rows.size());
    std::vector<Outcome> outcomes(static_cast<std::size_t>(dp * cp));
    run_mesh(dp, cp, [&](const Mesh& mesh) {
        const HybridModel model = load_model(coefficient);
        const Parallel parallel{.dp = dp,
                                .cp = cp,
                                .linear_attention_mode = LinearAttentionMode::kP2p,
                                .full_attention_mode = FullAttentionMode::kAllGather};
        std::vector<TokenBatch> batches;
        for (const auto& micro_batch : rows[static_cast<std::size_t>(mesh.dp->rank())]) {
            batches.push_back(make_rows(micro_batch));
        }
        Outcome& outcome = outcomes[static_cast<std::size_t>(mesh.world->rank())];
        outcome.loss = forward_backward(model, batches, parallel, mesh);
        for (const NamedParameter& parameter : model.parameters()) {
            outcome.grads.push_back(parameter.value.grad().clone());
        }
        const StepLoss again = forward_only(model, batches, parallel, mesh);
        EXPECT_EQ(again.aux_loss, outcome.loss.aux_loss);
    });
    return outcomes;
}

double relative_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        difference += (a[i] - b[i]).square().sum(at::kDouble).item<double>();
        norm += b[i].square().sum(at::kDouble).item<double>();
    }
    return std::sqrt(difference / norm);
}

void expect_equal(const std::vector<Outcome>& outcomes, const Outcome& one) {
    for (const Outcome& outcome : outcomes) {
        EXPECT_NEAR(*outcome.loss.aux_loss, *one.loss.aux_loss, 1e-6);
        EXPECT_NEAR(outcome.loss.ce_loss, one.loss.ce_loss, 2e-6);
        EXPECT_DOUBLE_EQ(outcome.loss.loss, outcome.loss.ce_loss + 0.5 * *outcome.loss.aux_loss);
        EXPECT_LT(relative_difference(outcome.grads, one.grads), 2e-5);
        EXPECT_EQ(outcome.loss.loss, outcomes.front().loss.loss);  // the same bits on every rank
        for (std::size_t i = 0; i < outcome.grads.size(); ++i) {
            EXPECT_TRUE(at::equal(outcome.grads[i], outcomes.front().grads[i])) << i;
        }
    }
}

TEST(RouterBalance, EverySplitOfAMicroBatch) {
    const Outcome one = run({{{0, 1, 2, 3}}}, 1).front();
    const Outcome without = run({{{0, 1, 2, 3}}}, 1, 0.0).front();
    EXPECT_GT(*one.loss.aux_loss, 2.0);  // two experts a token: perfect balance gives 2
    EXPECT_EQ(without.loss.loss, without.loss.ce_loss);
    EXPECT_EQ(*without.loss.aux_loss, *one.loss.aux_loss);
    EXPECT_GT(relative_difference(one.grads, without.grads), 1e-2) << "its gradient must show";
    for (const int cp : {2, 3, 4, 8}) {
        SCOPED_TRACE(fmt::format("cp {}", cp));
        expect_equal(run({{{0, 1, 2, 3}}}, cp), one);
    }
    for (const int cp : {1, 2}) {
        SCOPED_TRACE(fmt::format("dp, cp {}", cp));
        expect_equal(run({{{0, 1}}, {{2, 3}}}, cp), one);
        expect_equal(run({{{3}}, {{0, 2, 1}}}, cp), one);
    }
    expect_equal(run({{{0}}, {{1}}, {{2}}, {{3}}}, 1), one);
}

// It is the mean over micro-batches, each taken over all ranks; a rank may have fewer of them.
TEST(RouterBalance, MicroBatches) {
    const Outcome two = run({{{0, 1}, {2, 3}}}, 1).front();
    const Outcome first = run({{{0, 1}}}, 1).front(), second = run({{{2, 3}}}, 1).front();
    EXPECT_NEAR(*two.loss.aux_loss, (*first.loss.aux_loss + *second.loss.aux_loss) / 2, 1e-12);
    expect_equal(run({{{0}, {2}}, {{1}, {3}}}, 1), two);
    expect_equal(run({{{0}, {2}}, {{1}, {3}}}, 2), two);
    const Outcome uneven = run({{{0, 1}, {2}}}, 1).front();
    expect_equal(run({{{0}, {2}}, {{1}}}, 1), uneven);
    expect_equal(run({{{0, 1}, {2}}, {}}, 2), uneven);
}

// A rank whose shard is empty takes part.
TEST(RouterBalance, EmptyShards) {
    std::vector<Outcome> outcomes(4);
    const auto step = [](const Mesh& mesh, int cp, Outcome& outcome) {
        const HybridModel model = load_model();
        const TokenBatch batch{.document_lengths = {2, 0, 1},
                               .token_ids = at::tensor({5, 6, 7}, at::kLong),
                               .targets = at::tensor({6, -100, 9}, at::kLong)};
        const Parallel parallel{.cp = cp,
                                .linear_attention_mode = LinearAttentionMode::kP2p,
                                .full_attention_mode = FullAttentionMode::kAllGather};
        outcome.loss = forward_backward(model, {batch}, parallel, mesh);
        for (const NamedParameter& parameter : model.parameters()) {
            outcome.grads.push_back(parameter.value.grad().clone());
        }
    };
    Outcome one;
    run_mesh(1, 1, [&](const Mesh& mesh) { step(mesh, 1, one); });
    run_mesh(1, 4, [&](const Mesh& mesh) {
        step(mesh, 4, outcomes[static_cast<std::size_t>(mesh.world->rank())]);
    });
    expect_equal(outcomes, one);
}

TEST(RouterBalance, OneSmallMessageAMicroBatch) {
    run_mesh(1, 2, [](const Mesh& mesh) {
        const Parallel parallel{.cp = 2, .linear_attention_mode = LinearAttentionMode::kP2p};
        const std::vector<TokenBatch> batches{make_rows({0}), make_rows({1}), make_rows({2})};
        mesh.world->recorder().reset();
        (void)forward_only(load_model(), batches, parallel, mesh);
        const OpTraffic moved = mesh.world->recorder().of("router_balance");
        EXPECT_EQ(moved.messages, 1 + 3);
        EXPECT_EQ(moved.bytes, 8 + 3 * (2 * 8 + 1) * 8);
        const std::string dense_folder = std::string(HCP_GOLDEN_DIR) + "/models/dense_tiny";
        const ModelConfig dense = read_model_config(dense_folder);
        const HybridModel model(dense, load_parameters(dense_folder, dense, at::kCPU), at::kFloat);
        mesh.world->recorder().reset();
        const StepLoss loss = forward_only(model, batches, parallel, mesh);
        EXPECT_EQ(mesh.world->recorder().of("router_balance").messages, 0);
        EXPECT_EQ(loss.aux_loss, std::nullopt);
        EXPECT_EQ(loss.loss, loss.ce_loss);
    });
}

}  // namespace
}  // namespace hybridcp
