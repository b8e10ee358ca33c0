// What the modes send in layouts other than the contiguous one, counted by the recorder, equals the
// rows of docs/cost-model.md.

#include <gtest/gtest.h>

#include <bit>

#include "ops/conversion.h"
#include "ops/gdn_cases.h"
#include "ops/token_gather.h"
#include "rank_threads.h"

namespace hybridcp::testing {
namespace {

constexpr std::int64_t kTokens = 240;  // 2P divides it for every P below
constexpr GdnHeads kHeads{2, 4};
constexpr std::int64_t kStateBytes = 4 * 8 * 6 * 4;
constexpr std::int64_t kMatrixBytes = 4 * 8 * 8 * 4;

class EveryRankCount : public ::testing::TestWithParam<int> {
  protected:
    void SetUp() override {
        at::set_num_threads(1);
        at::manual_seed(31);
    }
};

/// A document whose heads do not decay, so that every M travels.
ShardedRun run_gdn(LayoutKind kind, int num_ranks, LinearAttentionMode mode) {
    OpInputs inputs = gdn_inputs(kTokens, kHeads);
    inputs.tokens[3].zero_();
    const Layout layout =
        Layout::make({.kind = kind, .num_ranks = num_ranks, .document_lengths = {kTokens}});
    return run_sharded(layout, Parallel{.linear_attention_mode = mode}, inputs, gdn_op);
}

/// Ranks of the chain's segments, in causal order.
std::vector<int> chain_of(LayoutKind kind, int num_ranks) {
    std::vector<int> ranks;
    const Layout layout =
        Layout::make({.kind = kind, .num_ranks = num_ranks, .document_lengths = {kTokens}});
    for (const Segment& segment : layout.chain(0)) {
        ranks.push_back(segment.rank);
    }
    return ranks;
}

TEST_P(EveryRankCount, P2pSendsOneStateALink) {
    for (const LayoutKind kind : kLayoutKinds) {
        const std::vector<int> chain = chain_of(kind, GetParam());
        std::vector<std::int64_t> links(static_cast<std::size_t>(GetParam()), 0);
        for (std::size_t i = 0; i + 1 < chain.size(); ++i) {
            ++links[static_cast<std::size_t>(chain[i])];      // the state
            ++links[static_cast<std::size_t>(chain[i + 1])];  // its gradient
        }
        const ShardedRun run = run_gdn(kind, GetParam(), LinearAttentionMode::kP2p);
        for (std::size_t r = 0; r < links.size(); ++r) {
            EXPECT_EQ(run.traffic[r].of("gdn_state").messages, links[r]);
            EXPECT_EQ(run.traffic[r].of("gdn_state").bytes, links[r] * kStateBytes);
        }
    }
}

TEST_P(EveryRankCount, ScanSendsWindowsInLogRounds) {
    const int P = GetParam();
    for (const LayoutKind kind : kLayoutKinds) {
        const std::vector<int> chain = chain_of(kind, P);
        const std::size_t n = chain.size();
        std::vector<std::int64_t> bytes(static_cast<std::size_t>(P), 0);
        std::vector<std::int64_t> back(static_cast<std::size_t>(P), 0);
        std::int64_t rounds = 0;
        for (std::size_t distance = 1; distance < n; distance *= 2, ++rounds) {
            for (std::size_t i = 0; i + distance < n; ++i) {
                const std::int64_t window = kStateBytes + (i < distance ? 0 : kMatrixBytes);
                const auto forward = static_cast<std::size_t>(chain[i]);
                const auto reverse = static_cast<std::size_t>(chain[n - 1 - i]);
                bytes[forward] += chain[i + distance] != chain[i] ? window : 0;
                back[reverse] += chain[n - 1 - i - distance] != chain[n - 1 - i] ? window : 0;
            }
        }
        EXPECT_EQ(rounds, static_cast<std::int64_t>(std::bit_width(n - 1)));
        const ShardedRun run = run_gdn(kind, P, LinearAttentionMode::kScan);
        for (std::size_t r = 0; r < bytes.size(); ++r) {
            EXPECT_EQ(run.traffic[r].of("gdn_scan").bytes, bytes[r]) << to_string(kind);
            EXPECT_EQ(run.traffic[r].of("gdn_gradient_scan").bytes, back[r]) << to_string(kind);
            EXPECT_LE(run.traffic[r].of("gdn_scan").messages, 2 * rounds);
            const std::int64_t slots = kind == LayoutKind::kZigzag && P > 2 ? 2 : 1;
            EXPECT_EQ(run.traffic[r].of("gdn_independent").bytes, (P - 1) * slots * 4);
        }
    }
}

TEST_P(EveryRankCount, AllGatherSendsTheSlotsOfTheFullestRank) {
    const int P = GetParam();
    const std::int64_t slots = P > 2 ? 2 : 1;  // of zigzag; the last segment of a chain has none
    const ShardedRun run = run_gdn(LayoutKind::kZigzag, P, LinearAttentionMode::kAllGather);
    for (const Recorder& recorder : run.traffic) {
        EXPECT_EQ(recorder.of("gdn_summary").bytes, (P - 1) * slots * (kStateBytes + kMatrixBytes));
        EXPECT_EQ(recorder.of("gdn_gradient_summary").bytes, (P - 1) * slots * kStateBytes);
    }
}

TEST_P(EveryRankCount, ZigzagToFoldedSwapsHalfAShardWithOnePartner) {
    const int P = GetParam();
    constexpr std::int64_t kWidth = 5;
    run_ranks(P, [&](Group& group) {
        const BatchPlan plan =
            make_batch_plan({.document_lengths = {kTokens, 2 * kTokens},
                             .parallel = {.cp = P,
                                          .layout_kind = LayoutKind::kZigzag,
                                          .linear_layout_kind = LayoutKind::kFolded},
                             .rank = group.rank()});
        const CpContext context{.group = &group, .plan = &plan, .parallel = {.cp = P}};
        const Sharded x{random({plan.num_local_tokens(), kWidth}).requires_grad_(true), plan.tag};
        convert(x, plan.linear->tag, context).local.sum().backward();
        const bool has_partner = (group.rank() ^ 1) < P;
        const OpTraffic traffic = group.recorder().of("conversion");
        EXPECT_EQ(traffic.messages, has_partner ? 2 : 0);
        EXPECT_EQ(traffic.bytes, has_partner ? 2 * plan.num_local_tokens() / 2 * kWidth * 4 : 0);
    });
}

TEST_P(EveryRankCount, GatherHiddenSendsEveryTokenToEveryRank) {
    const int P = GetParam();
    constexpr std::int64_t kWidth = 5;
    run_ranks(P, [&](Group& group) {
        const BatchPlan plan = make_batch_plan(
            Layout::make(
                {.kind = LayoutKind::kZigzag, .num_ranks = P, .document_lengths = {kTokens}}),
            group.rank(), kConvWidth, at::kCPU);
        const CpContext context{.group = &group, .plan = &plan, .parallel = {.cp = P}};
        const Sharded x{
            random({plan.num_local_tokens(), kWidth}).to(at::kBFloat16).requires_grad_(true),
            plan.tag};
        gather_tokens(x, {.op = "gather_hidden", .dtype = at::kBFloat16}, context).sum().backward();
        const OpTraffic traffic = group.recorder().of("gather_hidden");
        EXPECT_EQ(traffic.messages, 2);
        EXPECT_EQ(traffic.bytes, 2 * (P - 1) * (kTokens / P) * kWidth * 2);
    });
}

TEST_P(EveryRankCount, ZigzagToContiguousSendsTheRowsWhoseRankChanges) {
    const int P = GetParam();
    constexpr std::int64_t kWidth = 5;
    run_ranks(P, [&](Group& group) {
        const BatchPlan plan =
            make_batch_plan({.document_lengths = {kTokens},
                             .parallel = {.cp = P,
                                          .layout_kind = LayoutKind::kZigzag,
                                          .linear_layout_kind = LayoutKind::kContiguous},
                             .rank = group.rank()});
        const CpContext context{.group = &group, .plan = &plan, .parallel = {.cp = P}};
        const at::Tensor stays = at::isin(plan.flat_indices, plan.linear->flat_indices);
        const std::int64_t moved = stays.logical_not().sum().item<std::int64_t>();
        const Sharded x{random({plan.num_local_tokens(), kWidth}).requires_grad_(true), plan.tag};
        convert(x, plan.linear->tag, context).local.sum().backward();
        EXPECT_EQ(group.recorder().of("conversion").messages, 2);
        EXPECT_EQ(group.recorder().of("conversion").bytes, 2 * moved * kWidth * 4);
    });
}

TEST_P(EveryRankCount, HaloSendsThreeRowsALink) {
    constexpr std::int64_t kChannels = 6;
    const int P = GetParam();
    const OpInputs inputs{.tokens = {random({kTokens, kChannels})},
                          .weights = {random({kChannels, kConvWidth})},
                          .d_output = random({kTokens, kChannels})};
    for (const LayoutKind kind : kLayoutKinds) {
        const std::vector<int> chain = chain_of(kind, P);
        std::vector<std::int64_t> links(static_cast<std::size_t>(P), 0);
        for (std::size_t i = 0; i + 1 < chain.size(); ++i) {
            ++links[static_cast<std::size_t>(chain[i])];      // rows
            ++links[static_cast<std::size_t>(chain[i + 1])];  // their gradients
        }
        const ShardedRun run = run_sharded(
            Layout::make({.kind = kind, .num_ranks = P, .document_lengths = {kTokens}}), Parallel{},
            inputs, [](const std::vector<at::Tensor>& x, const CpContext& context) {
                return causal_conv_silu_cp(shard(x[0], context), x[1], context).local;
            });
        for (std::size_t r = 0; r < links.size(); ++r) {
            EXPECT_EQ(run.traffic[r].of("conv_halo").bytes,
                      links[r] * (kConvWidth - 1) * kChannels * 4);
        }
    }
}

TEST_P(EveryRankCount, AttentionUlyssesSendsTheHeadsOfOtherRanks) {
    constexpr std::int64_t kHeadDim = 8;
    const int P = GetParam();
    const OpInputs inputs{
        .tokens = {random({kTokens, std::int64_t{2} * P, kHeadDim}), random({kTokens, P, kHeadDim}),
                   random({kTokens, P, kHeadDim})},
        .weights = {},
        .d_output = random({kTokens, std::int64_t{2} * P, kHeadDim})};
    const ShardedRun run = run_sharded(
        Layout::make({.kind = LayoutKind::kZigzag, .num_ranks = P, .document_lengths = {kTokens}}),
        Parallel{.full_attention_mode = FullAttentionMode::kUlysses}, inputs,
        [](const std::vector<at::Tensor>& x, const CpContext& context) {
            return causal_attention_cp(shard(x[0], context), shard(x[1], context),
                                       shard(x[2], context), 0.3, context)
                .local;
        });
    // A rank has two query heads and one of k and of v: q, k, v there and o back, then the reverse.
    const std::int64_t one_way = (P - 1) * (kTokens / P) * kHeadDim * (2 + 1 + 1 + 2);
    for (const Recorder& recorder : run.traffic) {
        EXPECT_EQ(recorder.of("attention_ulysses").messages, 4);
        EXPECT_EQ(recorder.of("attention_ulysses").bytes, 2 * one_way * 4);
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, EveryRankCount, ::testing::Values(2, 3, 4, 5, 8));

}  // namespace
}  // namespace hybridcp::testing
