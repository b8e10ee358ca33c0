// Every op that exchanges, on every number of ranks, mode and layout, against a run on one rank
// that knows nothing of shards: the fp64 recurrence for Gated DeltaNet, fp64 kernels over whole
// documents for convolution and attention.

#include <gtest/gtest.h>

#include <ATen/Parallel.h>

#include "kernels/attention/attention.h"
#include "kernels/conv/causal_conv.h"
#include "ops/gdn_cases.h"
#include "ops/sharded_run.h"

namespace hybridcp::testing {
namespace {

constexpr double kOutputBar = 2e-6;    // golden bars: convolution and attention, outputs
constexpr double kGradientBar = 5e-6;  // and gradients
constexpr double kBf16Bar = 5e-3;

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
                        return causal_conv_silu_cp(shard(x[0], context), x[1], context).local;
                    });
    EXPECT_LE(relative_error(run.output, expected.output), kOutputBar);
    EXPECT_LE(relative_error(run.gradients[0], expected.gradients[0]), kGradientBar);
    EXPECT_LE(relative_error(run.gradients[1], expected.gradients[1]), kGradientBar);
}

TEST_P(EveryLayout, GatedDeltaRule) {
    const GdnHeads heads{2, 4};
    const OpInputs inputs = gdn_inputs(num_tokens(), heads);
    const Expected expected = gdn_recurrence(inputs, offsets_of(layout_case()));
    const Layout layout = make_layout(layout_case(), num_ranks());
    for (const LinearAttentionMode mode :
         {LinearAttentionMode::kP2p, LinearAttentionMode::kAllGather, LinearAttentionMode::kScan,
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

constexpr double kAttentionScale = 0.3;

Expected whole_attention(const LayoutCase& layout_case, const OpInputs& inputs) {
    std::vector<AttentionBlock> blocks;
    const std::vector<std::int64_t> offsets = offsets_of(layout_case);
    for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
        blocks.push_back({offsets[i], offsets[i + 1], offsets[i], offsets[i + 1]});
    }
    return run_whole(inputs, [&](const std::vector<at::Tensor>& x) {
        return causal_attention(x[0], x[1], x[2], blocks, kAttentionScale).o;
    });
}

ShardedRun sharded_attention(const LayoutCase& layout_case,
                             int num_ranks,
                             const OpInputs& inputs,
                             FullAttentionMode mode) {
    return run_sharded(make_layout(layout_case, num_ranks), Parallel{.full_attention_mode = mode},
                       inputs, [](const std::vector<at::Tensor>& x, const CpContext& context) {
                           return causal_attention_cp(shard(x[0], context), shard(x[1], context),
                                                      shard(x[2], context), kAttentionScale,
                                                      context)
                               .local;
                       });
}

void expect_attention(const LayoutCase& layout_case,
                      int num_ranks,
                      const OpInputs& inputs,
                      FullAttentionMode mode) {
    const Expected expected = whole_attention(layout_case, inputs);
    const ShardedRun run = sharded_attention(layout_case, num_ranks, inputs, mode);
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

TEST_P(EveryLayout, AttentionRoundARing) {
    expect_attention(layout_case(), num_ranks(), attention_inputs(num_tokens(), 6, 2),
                     FullAttentionMode::kRing);
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

// The modes that move bf16 keys compute in fp32 and round once, as one rank does: they are as exact
// as it is, even where few keys carry all the weight and <d_o, v> almost cancels.
TEST(Numerics, AttentionInBf16IsAsExactOnRanksAsOnOne) {
    at::set_num_threads(1);
    at::manual_seed(8);
    const LayoutCase layout_case{
        .name = "", .document_lengths = {2, 90, 33, 2}, .kind = LayoutKind::kZigzag};
    OpInputs inputs = attention_inputs(127, 6, 2);
    inputs.tokens[0] *= 6;
    for (at::Tensor* tensor :
         {&inputs.tokens[0], &inputs.tokens[1], &inputs.tokens[2], &inputs.d_output}) {
        *tensor = tensor->to(at::kBFloat16);
    }
    const Expected expected = whole_attention(layout_case, inputs);
    const auto errors = [&](int num_ranks, FullAttentionMode mode) {
        const ShardedRun run = sharded_attention(layout_case, num_ranks, inputs, mode);
        std::vector<double> result{relative_error(run.output, expected.output)};
        for (std::size_t i = 0; i < 3; ++i) {
            EXPECT_EQ(run.gradients[i].scalar_type(), at::kBFloat16);
            result.push_back(relative_error(run.gradients[i], expected.gradients[i]));
        }
        return result;
    };
    const std::vector<double> one_rank = errors(1, FullAttentionMode::kRing);
    for (const FullAttentionMode mode : {FullAttentionMode::kRing, FullAttentionMode::kAllGather}) {
        for (const int num_ranks : {2, 3, 4}) {
            const std::vector<double> error = errors(num_ranks, mode);
            for (std::size_t i = 0; i < error.size(); ++i) {
                EXPECT_LE(error[i], kBf16Bar) << i;
                EXPECT_LE(error[i], 1.05 * one_rank[i])
                    << (i == 0 ? "output" : "gradient") << " on " << num_ranks << " ranks";
            }
        }
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
         {LinearAttentionMode::kP2p, LinearAttentionMode::kAllGather, LinearAttentionMode::kScan}) {
        for (const LayoutKind kind : kLayoutKinds) {
            const Layout layout =
                Layout::make({.kind = kind, .num_ranks = 5, .document_lengths = {160}});
            expect_gdn(run_sharded(layout, Parallel{.linear_attention_mode = mode}, inputs, gdn_op),
                       expected);
        }
    }
}

}  // namespace
}  // namespace hybridcp::testing
