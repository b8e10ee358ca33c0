// Rows with padding: two rows of 8,192 tokens of which 7,777 are valid, on 4 ranks. What stands in
// the padding (NaN here) reaches nothing, outputs and gradients there are exactly zero, and each
// row is what it is alone.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>

#include "ops/sharded_run.h"
#include "train/step.h"

namespace hybridcp::testing {
namespace {

constexpr std::int64_t kRows = 2;
constexpr std::int64_t kRowLength = 8192;
constexpr std::int64_t kValid = 7777;
constexpr double kBar = 1e-5;

/// [rows, row length, ...] with NaN where padding is.
at::Tensor padded_rows(std::vector<std::int64_t> shape, bool negative = false) {
    shape.insert(shape.begin(), {kRows, kRowLength});
    at::Tensor rows = negative ? -at::rand(shape) : at::randn(shape);
    rows.narrow(1, kValid, kRowLength - kValid).fill_(std::nan(""));
    return rows;
}

/// The valid tokens of all rows, flat: the layout's documents.
at::Tensor valid_tokens(const at::Tensor& rows) {
    return rows.narrow(1, 0, kValid).flatten(0, 1);
}

void expect_zero_padding(const at::Tensor& flat) {
    const at::Tensor rows = rows_from_flat(flat, {kValid, kValid}, kRowLength);
    ASSERT_EQ(rows.size(1), kRowLength);
    EXPECT_TRUE(rows.narrow(1, kValid, kRowLength - kValid).eq(0).all().item<bool>());
    EXPECT_TRUE(at::equal(valid_tokens(rows), flat));
}

TEST(Padding, TwoRowsOf8192With7777ValidTokens) {
    at::set_num_threads(1);
    at::manual_seed(8);
    constexpr std::int64_t kKeyHeads = 1, kValueHeads = 2, kDim = 8;
    const std::vector<at::Tensor> rows{
        padded_rows({kKeyHeads, kDim}), padded_rows({kKeyHeads, kDim}),
        padded_rows({kValueHeads, kDim}), padded_rows({kValueHeads}, true),
        padded_rows({kValueHeads}, true).neg()};
    OpInputs inputs{
        .tokens = {}, .weights = {}, .d_output = valid_tokens(padded_rows({kValueHeads, kDim}))};
    for (const at::Tensor& tensor : rows) {
        inputs.tokens.push_back(valid_tokens(tensor));
    }
    std::vector<at::Tensor> wide;
    for (const at::Tensor& tensor : inputs.tokens) {
        wide.push_back(tensor.to(at::kDouble));
    }
    const GdnInputs reference_inputs{
        .q = wide[0], .k = wide[1], .v = wide[2], .g = wide[3], .beta = wide[4]};
    const auto reference = make_gdn_call(GdnBackend::kReference, reference_inputs,
                                         {0, kValid, 2 * kValid}, GdnOptions{});
    const at::Tensor expected = reference->forward(at::Tensor()).o;
    const GdnGradients gradients =
        reference->backward(inputs.d_output.to(at::kDouble), at::Tensor());
    const std::vector<at::Tensor> expected_gradients{gradients.dq, gradients.dk, gradients.dv,
                                                     gradients.dg, gradients.dbeta};

    const Layout layout = Layout::make({.num_ranks = 4, .document_lengths = {kValid, kValid}});
    const ShardedRun run =
        run_sharded(layout, Parallel{.linear_attention_mode = LinearAttentionMode::kP2p}, inputs,
                    [](const std::vector<at::Tensor>& x, const CpContext& context) {
                        return gated_delta_rule_cp({.q = shard(x[0], context),
                                                    .k = shard(x[1], context),
                                                    .v = shard(x[2], context),
                                                    .g = shard(x[3], context),
                                                    .beta = shard(x[4], context)},
                                                   GdnOptions{}, context)
                            .o.local;
                    });
    EXPECT_LE(worst_head_error(run.output, expected), kBar);
    expect_zero_padding(run.output);
    for (std::size_t i = 0; i < expected_gradients.size(); ++i) {
        EXPECT_LE(worst_head_error(run.gradients[i], expected_gradients[i]), kBar)
            << "gradient " << i;
        expect_zero_padding(run.gradients[i]);
    }
}

}  // namespace
}  // namespace hybridcp::testing
