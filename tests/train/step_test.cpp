// One step's loss and gradients do not depend on how it is split over dp, cp and micro-batches.
#include "train/step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "hybridcp/error.h"
#include "mesh_threads.h"
#include "train/gradient_reduction.h"

namespace hybridcp {
namespace {

using testing::message_of;
using testing::run_mesh;

const std::string kModelFolder = std::string(HCP_GOLDEN_DIR) + "/models/dense_tiny";

HybridModel load_model(at::ScalarType dtype = at::kFloat) {
    const ModelConfig config = read_model_config(kModelFolder);
    return HybridModel(config, load_parameters(kModelFolder, config, at::kCPU), dtype);
}

/// Rows of uneven documents; `ignore` says which targets count.
template <typename Ignore>
TokenBatch make_rows(std::int64_t first_row, std::int64_t num_rows, const Ignore& ignore) {
    TokenBatch batch;
    std::vector<std::int64_t> ids, targets;
    for (std::int64_t row = first_row; row < first_row + num_rows; ++row) {
        for (const std::int64_t length : {17 + row, std::int64_t{1}, std::int64_t{30}}) {
            batch.document_lengths.push_back(length);
            for (std::int64_t i = 0; i < length; ++i) {
                ids.push_back((row * 131 + length * 31 + i * i * 7) % 512);
                const bool last = i + 1 == length;
                targets.push_back(last || ignore(row, i)
                                      ? -100
                                      : (row * 131 + length * 31 + (i + 1) * (i + 1) * 7) % 512);
            }
        }
    }
    batch.token_ids = at::tensor(ids, at::kLong);
    batch.targets = at::tensor(targets, at::kLong);
    return batch;
}

struct Outcome {
    StepLoss loss;
    std::vector<at::Tensor> grads;
};

struct Split {
    int dp, cp;
    std::int64_t rows_per_micro_batch;
};

Parallel make_cp(int dp, int cp, LinearAttentionMode mode) {
    return {.dp = dp,
            .cp = cp,
            .linear_attention_mode = mode,
            .full_attention_mode = FullAttentionMode::kAllGather};
}

/// Outcome of four rows on every rank.
template <typename Ignore>
std::vector<Outcome> run_split(const Split& split, LinearAttentionMode mode, const Ignore& ignore) {
    std::vector<Outcome> outcomes(static_cast<std::size_t>(split.dp * split.cp));
    run_mesh(split.dp, split.cp, [&](const Mesh& mesh) {
        const HybridModel model = load_model();
        const std::int64_t rows = 4 / split.dp;
        std::vector<TokenBatch> batches;
        for (std::int64_t row = 0; row < rows; row += split.rows_per_micro_batch) {
            batches.push_back(
                make_rows(mesh.dp->rank() * rows + row, split.rows_per_micro_batch, ignore));
        }
        Outcome& outcome = outcomes[static_cast<std::size_t>(mesh.world->rank())];
        outcome.loss = forward_backward(model, batches, make_cp(split.dp, split.cp, mode), mesh);
        for (const NamedParameter& parameter : model.parameters()) {
            outcome.grads.push_back(parameter.value.grad().clone());
        }
        const StepLoss again =
            forward_only(model, batches, make_cp(split.dp, split.cp, mode), mesh);
        EXPECT_NEAR(again.loss, outcome.loss.loss, 1e-6);
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

template <typename Ignore>
void expect_invariant(const std::vector<Split>& splits, const Ignore& ignore) {
    const Outcome one = run_split({1, 1, 4}, LinearAttentionMode::kUlysses, ignore).front();
    EXPECT_GT(one.loss.num_labels, 0);
    for (const Split& split : splits) {
        SCOPED_TRACE(fmt::format("dp {} cp {} micro-batches of {}", split.dp, split.cp,
                                 split.rows_per_micro_batch));
        const auto outcomes = run_split(split, LinearAttentionMode::kP2p, ignore);
        for (const Outcome& outcome : outcomes) {
            EXPECT_EQ(outcome.loss.num_labels, one.loss.num_labels);
            EXPECT_EQ(outcome.loss.num_tokens, one.loss.num_tokens);
            EXPECT_NEAR(outcome.loss.loss, one.loss.loss, 2e-6);
            EXPECT_LT(relative_difference(outcome.grads, one.grads), 2e-5);
            for (std::size_t i = 0; i < outcome.grads.size(); ++i) {
                EXPECT_TRUE(at::equal(outcome.grads[i], outcomes.front().grads[i]));  // same bits
            }
        }
    }
}

TEST(Step, LossAndGradientsAreInvariantOverTheSplit) {
    expect_invariant({{1, 1, 1}, {1, 1, 2}, {2, 1, 1}, {1, 3, 2}, {2, 2, 1}},
                     [](std::int64_t row, std::int64_t i) { return (row * 5 + i) % 9 == 0; });
}

TEST(Step, LabelsMayBeMissingOnSomeRanksAndMicroBatches) {
    // Only the second row of four has labels, and only near its start: with dp 2 and cp 2 one rank
    // has them all.
    expect_invariant({{2, 2, 1}, {4, 1, 1}, {1, 4, 1}},
                     [](std::int64_t row, std::int64_t i) { return row != 1 || i > 3; });
}

TEST(Step, WithoutAnyLabelTheLossIsZeroAndSoAreTheGradients) {
    const auto outcomes = run_split({1, 2, 4}, LinearAttentionMode::kP2p,
                                    [](std::int64_t, std::int64_t) { return true; });
    for (const Outcome& outcome : outcomes) {
        EXPECT_EQ(outcome.loss.loss, 0.0);
        EXPECT_EQ(outcome.loss.num_labels, 0);
        for (const at::Tensor& grad : outcome.grads) {
            EXPECT_EQ(grad.abs().max().item<float>(), 0.0F);
        }
    }
}

TEST(Step, AnEmptyShardTakesPart) {
    std::vector<Outcome> outcomes(4);
    Outcome one;
    const auto run = [](const Mesh& mesh, int cp, Outcome& outcome) {
        const HybridModel model = load_model();
        const TokenBatch batch{.document_lengths = {2, 0, 1},
                               .token_ids = at::tensor({5, 6, 7}, at::kLong),
                               .targets = at::tensor({6, -100, 9}, at::kLong)};
        outcome.loss =
            forward_backward(model, {batch}, make_cp(1, cp, LinearAttentionMode::kP2p), mesh);
        for (const NamedParameter& parameter : model.parameters()) {
            outcome.grads.push_back(parameter.value.grad().clone());
        }
    };
    run_mesh(1, 1, [&](const Mesh& mesh) { run(mesh, 1, one); });
    run_mesh(1, 4, [&](const Mesh& mesh) {
        run(mesh, 4, outcomes[static_cast<std::size_t>(mesh.world->rank())]);
    });
    for (const Outcome& outcome : outcomes) {
        EXPECT_NEAR(outcome.loss.loss, one.loss.loss, 2e-6);
        EXPECT_LT(relative_difference(outcome.grads, one.grads), 2e-5);
    }
}

TEST(Step, RanksOfOneSequenceMustHoldTheSameBatch) {
    const std::string message = message_of([] {
        run_mesh(1, 2, [](const Mesh& mesh) {
            const HybridModel model = load_model();
            TokenBatch batch = make_rows(0, 1, [](std::int64_t, std::int64_t) { return false; });
            batch.token_ids[3] = mesh.cp->rank();
            (void)forward_backward(model, {batch}, make_cp(1, 2, LinearAttentionMode::kP2p), mesh);
        });
    });
    EXPECT_NE(message.find("the step's batch and its layout"), std::string::npos) << message;
}

TEST(Step, ANonFiniteLossNamesTheLayerOnEveryRank) {
    std::vector<std::string> messages(2);
    run_mesh(1, 2, [&](const Mesh& mesh) {
        const HybridModel model = load_model();
        at::Tensor weight = model.parameter("model.layers.2.mlp.down_proj.weight").detach();
        weight[0][0] = std::numeric_limits<float>::quiet_NaN();
        const TokenBatch batch = make_rows(0, 1, [](std::int64_t, std::int64_t) { return false; });
        messages[static_cast<std::size_t>(mesh.cp->rank())] = message_of([&] {
            (void)forward_backward(model, {batch}, make_cp(1, 2, LinearAttentionMode::kP2p), mesh);
        });
    });
    for (const std::string& message : messages) {
        EXPECT_NE(message.find("output of layer 2 (linear attention)"), std::string::npos)
            << message;
    }
}

TEST(GradientReduction, BucketsSumWhatEachRankHasAndFillWhatItLacks) {
    for (const std::int64_t bucket_bytes : {1, 24, 1 << 20}) {
        run_mesh(1, 3, [&](const Mesh& mesh) {
            std::vector<NamedParameter> parameters;
            for (const std::int64_t size : {2, 3, 5}) {
                parameters.push_back(
                    {std::to_string(size), at::zeros({size}, at::kFloat).set_requires_grad(true)});
            }
            const int rank = mesh.world->rank();
            if (rank != 1) {
                parameters[0].value.mutable_grad() = at::full({2}, 1.0 + rank);
            }
            parameters[2].value.mutable_grad() = at::arange(5, at::kFloat) * (rank + 1);
            all_reduce_gradients(parameters, *mesh.world, bucket_bytes);
            EXPECT_TRUE(at::equal(parameters[0].value.grad(), at::full({2}, 4.0)));
            EXPECT_TRUE(at::equal(parameters[1].value.grad(), at::zeros({3})));
            EXPECT_TRUE(at::equal(parameters[2].value.grad(), at::arange(5, at::kFloat) * 6));
            EXPECT_EQ(first_non_finite_gradient(whole_pieces(parameters)), "");
            parameters[1].value.mutable_grad()[1] = std::numeric_limits<float>::infinity();
            EXPECT_EQ(first_non_finite_gradient(whole_pieces(parameters)), "3");
        });
    }
}

TEST(Mesh, NeighboursShareASequence) {
    run_mesh(2, 3, [](const Mesh& mesh) {
        const int rank = mesh.world->rank();
        EXPECT_EQ(mesh.cp->rank(), rank % 3);
        EXPECT_EQ(mesh.dp->rank(), rank / 3);
        at::Tensor value = at::tensor({std::int64_t{1} << rank}, at::kLong);
        at::Tensor other = value.clone();
        mesh.cp->all_reduce_sum("cp", value);
        mesh.dp->all_reduce_sum("dp", other);
        EXPECT_EQ(value.item<std::int64_t>(), rank < 3 ? 7 : 56);
        EXPECT_EQ(other.item<std::int64_t>(), 9 << (rank % 3));
    });
    EXPECT_NE(message_of([] {
                  (void)make_mesh({}, {.world_size = 2, .dp = 1, .cp = 4});
              }).find("use --nproc 4"),
              std::string::npos);
}

TEST(Rows, PaddingIsDroppedAndComesBackAsZeros) {
    const at::Tensor ids = at::arange(8, at::kLong).reshape({2, 4});
    const TokenBatch batch = batch_from_rows(ids, ids + 1, {3, 0});
    EXPECT_TRUE(at::equal(batch.token_ids, at::tensor({0, 1, 2}, at::kLong)));
    EXPECT_TRUE(at::equal(batch.targets, at::tensor({1, 2, 3}, at::kLong)));
    EXPECT_EQ(batch.document_lengths, (std::vector<std::int64_t>{3, 0}));
    const at::Tensor rows = rows_from_flat(at::ones({3, 2}), {3, 0}, 4);
    EXPECT_EQ(rows.sizes(), (at::IntArrayRef{2, 4, 2}));
    EXPECT_EQ(rows.sum().item<float>(), 6.0F);
    EXPECT_EQ(rows[0][3].abs().sum().item<float>(), 0.0F);
    EXPECT_EQ(batch_from_rows(ids, ids).document_lengths, (std::vector<std::int64_t>{4, 4}));
    EXPECT_THROW((void)batch_from_rows(ids, ids, {5, 0}), UsageError);
}

TEST(Rows, GatheredLocalTokensStandInFlatOrder) {
    run_mesh(1, 3, [](const Mesh& mesh) {
        const Layout layout = Layout::make({.num_ranks = 3, .document_lengths = {7, 0, 1, 5}});
        const at::Tensor indices = at::tensor(layout.flat_indices(mesh.cp->rank()), at::kLong);
        const at::Tensor flat = gather_flat(indices.unsqueeze(1) * 10, layout, *mesh.cp);
        EXPECT_TRUE(at::equal(flat, at::arange(13, at::kLong).unsqueeze(1) * 10));
    });
}

}  // namespace
}  // namespace hybridcp
