// Every op that exchanges, on every number of ranks, mode and layout, against a run on one rank
// that knows nothing of shards: the fp64 recurrence for Gated DeltaNet, fp64 kernels over whole
// documents for convolution and attention.

#include <gtest/gtest.h>

#include <ATen/Parallel.h>

#include "kernels/attention/attention.h"
#include "kernels/conv/causal_conv.h"
#include "ops/sharded_run.h"

namespace hybridcp::testing {
namespace {

constexpr double kGdnBar = 1e-5;       // golden bars: gdn, plain regimes
constexpr double kOutputBar = 2e-6;    // convolution and attention, outputs
constexpr double kGradientBar = 5e-6;  // and gradients

at::Tensor random(std::vector<std::int64_t> shape) {
    return at::randn(shape, at::TensorOptions().dtype(at::kFloat));
}

std::vector<at::Tensor> to_double(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> result;
    for (const at::Tensor& tensor : tensors) {
        result.push_back(tensor.to(at::kDouble).detach().requires_grad_(true));
    }
    return result;
}

struct Expected {
    at::Tensor output;
    std::vector<at::Tensor> gradients;
};

/// fp64 autograd of an op over whole documents.
Expected run_whole(const OpInputs& inputs,
                   const std::function<at::Tensor(const std::vector<at::Tensor>&)>& op) {
    std::vector<at::Tensor> all = inputs.tokens;
    all.insert(all.end(), inputs.weights.begin(), inputs.weights.end());
    all = to_double(all);
    const at::Tensor output = op(all);
    (output * inputs.d_output.to(at::kDouble)).sum().backward();
    Expected expected{.output = output.detach(), .gradients = {}};
    for (const at::Tensor& leaf : all) {
        expected.gradients.push_back(leaf.grad().defined() ? leaf.grad() : at::zeros_like(leaf));
    }
    return expected;
}

std::vector<std::int64_t> offsets_of(const LayoutCase& layout_case) {
    std::vector<std::int64_t> offsets{0};
    for (const std::int64_t length : layout_case.document_lengths) {
        offsets.push_back(offsets.back() + length);
    }
    return offsets;
}

class EveryLayout : public ::testing::TestWithParam<std::tuple<int, LayoutCase>> {
  protected:
    void SetUp() override {
        at::set_num_threads(1);
        at::manual_seed(11);
    }
    int num_ranks() const { return std::get<0>(GetParam()); }
    const LayoutCase& layout_case() const { return std::get<1>(GetParam()); }
    std::int64_t num_tokens() const { return offsets_of(layout_case()).back(); }
};

TEST_P(EveryLayout, Convolution) {
    const std::int64_t T = num_tokens();
    const OpInputs inputs{.tokens = {random({T, 6})},
                          .weights = {random({6, kConvWidth})},
                          .d_output = random({T, 6})};
    const Expected expected = run_whole(inputs, [&](const std::vector<at::Tensor>& x) {
        return causal_conv_silu(x[0], x[1], at::Tensor(), offsets_of(layout_case()));
    });
    const ShardedRun run =
        run_sharded(make_layout(layout_case(), num_ranks()), Parallel{}, inputs,
                    [](const std::vector<at::Tensor>& x, const CpContext& context) {
                        return causal_conv_silu_cp(x[0], x[1], context);
                    });
    EXPECT_LE(relative_error(run.output, expected.output), kOutputBar);
    EXPECT_LE(relative_error(run.gradients[0], expected.gradients[0]), kGradientBar);
    EXPECT_LE(relative_error(run.gradients[1], expected.gradients[1]), kGradientBar);
}

struct GdnHeads {
    std::int64_t key_heads;
    std::int64_t value_heads;
};

OpInputs gdn_inputs(std::int64_t T, const GdnHeads& heads) {
    constexpr std::int64_t kKeyDim = 8;
    constexpr std::int64_t kValueDim = 6;
    const at::Tensor rate = at::rand({heads.value_heads}) * 2.0;  // decay speeds from none to fast
    return {.tokens = {random({T, heads.key_heads, kKeyDim}), random({T, heads.key_heads, kKeyDim}),
                       random({T, heads.value_heads, kValueDim}),
                       -at::rand({T, heads.value_heads}) * rate, at::rand({T, heads.value_heads})},
            .weights = {},
            .d_output = random({T, heads.value_heads, kValueDim})};
}

GdnInputs as_gdn(const std::vector<at::Tensor>& x) {
    return {.q = x[0], .k = x[1], .v = x[2], .g = x[3], .beta = x[4]};
}

Expected gdn_recurrence(const OpInputs& inputs, const std::vector<std::int64_t>& offsets) {
    const auto call = make_gdn_call(GdnBackend::kReference, as_gdn(to_double(inputs.tokens)),
                                    offsets, GdnOptions{});
    const GdnOutput output = call->forward(at::Tensor());
    const GdnGradients gradients = call->backward(inputs.d_output.to(at::kDouble), at::Tensor());
    return {.output = output.o,
            .gradients = {gradients.dq, gradients.dk, gradients.dv, gradients.dg, gradients.dbeta}};
}

void expect_gdn(const ShardedRun& run, const Expected& expected) {
    const std::array<const char*, 5> names{"dq", "dk", "dv", "dg", "dbeta"};
    EXPECT_LE(worst_head_error(run.output, expected.output), kGdnBar) << "o";
    for (std::size_t i = 0; i < names.size(); ++i) {
        EXPECT_LE(worst_head_error(run.gradients[i], expected.gradients[i]), kGdnBar) << names[i];
    }
}

at::Tensor gdn_op(const std::vector<at::Tensor>& x, const CpContext& context) {
    return gated_delta_rule_cp(as_gdn(x), GdnOptions{.chunk_size = 16}, context);
}

TEST_P(EveryLayout, GatedDeltaRule) {
    const GdnHeads heads{2, 4};
    const OpInputs inputs = gdn_inputs(num_tokens(), heads);
    const Expected expected = gdn_recurrence(inputs, offsets_of(layout_case()));
    const Layout layout = make_layout(layout_case(), num_ranks());
    for (const LinearAttentionMode mode :
         {LinearAttentionMode::kP2p, LinearAttentionMode::kAllGather,
          LinearAttentionMode::kUlysses}) {
        SCOPED_TRACE(static_cast<int>(mode));
        if (mode == LinearAttentionMode::kUlysses && heads.value_heads % num_ranks() != 0) {
            continue;
        }
        expect_gdn(run_sharded(layout, Parallel{.linear_attention_mode = mode}, inputs, gdn_op),
                   expected);
    }
}

OpInputs attention_inputs(std::int64_t T, std::int64_t query_heads, std::int64_t kv_heads) {
    constexpr std::int64_t kHeadDim = 8;
    return {.tokens = {random({T, query_heads, kHeadDim}), random({T, kv_heads, kHeadDim}),
                       random({T, kv_heads, kHeadDim})},
            .weights = {},
            .d_output = random({T, query_heads, kHeadDim})};
}

void expect_attention(const LayoutCase& layout_case,
                      int num_ranks,
                      const OpInputs& inputs,
                      FullAttentionMode mode) {
    std::vector<AttentionBlock> blocks;
    const std::vector<std::int64_t> offsets = offsets_of(layout_case);
    for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
        blocks.push_back({offsets[i], offsets[i + 1], offsets[i], offsets[i + 1]});
    }
    constexpr double kScale = 0.3;
    const Expected expected = run_whole(inputs, [&](const std::vector<at::Tensor>& x) {
        return causal_attention(x[0], x[1], x[2], blocks, kScale).o;
    });
    const ShardedRun run =
        run_sharded(make_layout(layout_case, num_ranks), Parallel{.full_attention_mode = mode},
                    inputs, [](const std::vector<at::Tensor>& x, const CpContext& context) {
                        return causal_attention_cp(x[0], x[1], x[2], kScale, context);
                    });
    EXPECT_LE(worst_head_error(run.output, expected.output), kOutputBar);
    for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_LE(worst_head_error(run.gradients[i], expected.gradients[i]), kGradientBar)
            << "gradient " << i;
    }
}

TEST_P(EveryLayout, AttentionByGatheredKeys) {
    expect_attention(layout_case(), num_ranks(), attention_inputs(num_tokens(), 4, 2),
                     FullAttentionMode::kAllGather);
}

TEST_P(EveryLayout, AttentionByHeadShards) {
    const std::int64_t query_heads =
        num_ranks() * 2;  // KV heads are shared where ranks exceed them
    const std::int64_t kv_heads = query_heads % 4 == 0 ? 4 : 2;
    expect_attention(layout_case(), num_ranks(),
                     attention_inputs(num_tokens(), query_heads, kv_heads),
                     FullAttentionMode::kUlysses);
}

INSTANTIATE_TEST_SUITE_P(Ranks,
                         EveryLayout,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 5, 8),
                                            ::testing::ValuesIn(layout_cases())),
                         [](const auto& test) {
                             return std::get<1>(test.param).name + "_p" +
                                    std::to_string(std::get<0>(test.param));
                         });

TEST(SharedKeyHeads, UlyssesSplitsValueHeadsThatKeyHeadsDoNotDivide) {
    at::set_num_threads(1);
    at::manual_seed(5);
    const std::vector<std::int64_t> documents{40, 33};
    for (const GdnHeads heads :
         {GdnHeads{1, 6}, GdnHeads{2, 6}, GdnHeads{3, 12}, GdnHeads{4, 8}, GdnHeads{2, 10}}) {
        const OpInputs inputs = gdn_inputs(73, heads);
        const Expected expected = gdn_recurrence(inputs, {0, 40, 73});
        for (const int num_ranks : {2, 3, 4, 5}) {
            if (heads.value_heads % num_ranks != 0) {
                continue;
            }
            SCOPED_TRACE(fmt::format("{} key heads, {} value heads, {} ranks", heads.key_heads,
                                     heads.value_heads, num_ranks));
            const Layout layout =
                Layout::make({.num_ranks = num_ranks, .document_lengths = documents});
            expect_gdn(run_sharded(layout,
                                   Parallel{.linear_attention_mode = LinearAttentionMode::kUlysses},
                                   inputs, gdn_op),
                       expected);
        }
    }
}

TEST(SharedKeyHeads, AttentionUlyssesSplitsQueryHeadsThatKvHeadsDoNotDivide) {
    at::set_num_threads(1);
    at::manual_seed(6);
    const LayoutCase layout_case{.name = "", .document_lengths = {40, 33}};
    for (const auto& [query_heads, kv_heads, num_ranks] :
         {std::tuple{24, 4, 3}, std::tuple{6, 2, 3}, std::tuple{12, 4, 6}, std::tuple{8, 1, 8},
          std::tuple{6, 3, 2}}) {
        SCOPED_TRACE(
            fmt::format("{} query heads, {} KV heads, {} ranks", query_heads, kv_heads, num_ranks));
        expect_attention(layout_case, num_ranks, attention_inputs(73, query_heads, kv_heads),
                         FullAttentionMode::kUlysses);
    }
}

TEST(Numerics, HeadsWithoutDecayAndWithFullResetsCrossRanksExactly) {
    at::set_num_threads(1);
    at::manual_seed(7);
    OpInputs inputs = gdn_inputs(160, {2, 4});
    inputs.tokens[3].select(1, 0).zero_();       // never decays
    inputs.tokens[3].select(1, 1).fill_(-20.0);  // strong decay everywhere
    inputs.tokens[3].select(1, 2)[77] = -std::numeric_limits<float>::infinity();  // one full reset
    const Expected expected = gdn_recurrence(inputs, {0, 160});
    for (const LinearAttentionMode mode :
         {LinearAttentionMode::kP2p, LinearAttentionMode::kAllGather}) {
        const Layout layout = Layout::make({.num_ranks = 5, .document_lengths = {160}});
        expect_gdn(run_sharded(layout, Parallel{.linear_attention_mode = mode}, inputs, gdn_op),
                   expected);
    }
}

}  // namespace
}  // namespace hybridcp::testing
