// What each mode sends, counted by the recorder, equals the formulas of docs/modes.md; and many
// passes in one process group neither hang, nor grow, nor change a bit.

#include <gtest/gtest.h>

#include <ATen/Parallel.h>

#include <fstream>

#include "ops/sharded_run.h"

namespace hybridcp::testing {
namespace {

constexpr std::int64_t kTokens = 64;
constexpr std::int64_t kKeyHeads = 2;
constexpr std::int64_t kValueHeads = 4;
constexpr std::int64_t kKeyDim = 8;
constexpr std::int64_t kValueDim = 6;
constexpr std::int64_t kStateBytes = kValueHeads * kKeyDim * kValueDim * 4;
constexpr std::int64_t kMatrixBytes = kValueHeads * kKeyDim * kKeyDim * 4;

at::Tensor random(std::vector<std::int64_t> shape, at::ScalarType dtype = at::kFloat) {
    return at::randn(shape, at::TensorOptions().dtype(at::kFloat)).to(dtype);
}

OpInputs gdn_inputs(at::ScalarType dtype) {
    return {
        .tokens = {random({kTokens, kKeyHeads, kKeyDim}, dtype),
                   random({kTokens, kKeyHeads, kKeyDim}, dtype),
                   random({kTokens, kValueHeads, kValueDim}, dtype),
                   -at::rand({kTokens, kValueHeads}), at::rand({kTokens, kValueHeads}).to(dtype)},
        .weights = {},
        .d_output = random({kTokens, kValueHeads, kValueDim}, dtype)};
}

at::Tensor gdn_op(const std::vector<at::Tensor>& x, const CpContext& context) {
    return gated_delta_rule_cp({.q = shard(x[0], context),
                                .k = shard(x[1], context),
                                .v = shard(x[2], context),
                                .g = shard(x[3], context),
                                .beta = shard(x[4], context)},
                               GdnOptions{.chunk_size = 16}, context)
        .o.local;
}

Layout one_document(int num_ranks) {
    return Layout::make({.num_ranks = num_ranks, .document_lengths = {kTokens}});
}

class EveryRankCount : public ::testing::TestWithParam<int> {
  protected:
    void SetUp() override {
        at::set_num_threads(1);
        at::manual_seed(3);
    }
};

TEST_P(EveryRankCount, P2pSendsOneStatePerHopAndDirection) {
    const int P = GetParam();
    const ShardedRun run =
        run_sharded(one_document(P), Parallel{.linear_attention_mode = LinearAttentionMode::kP2p},
                    gdn_inputs(at::kBFloat16), gdn_op);
    for (int r = 0; r < P; ++r) {
        const std::int64_t hops =
            (r + 1 < P ? 1 : 0) + (r > 0 ? 1 : 0);  // state forward, gradient back
        const OpTraffic traffic = run.traffic[static_cast<std::size_t>(r)].of("gdn_state");
        EXPECT_EQ(traffic.messages, hops) << "rank " << r;
        EXPECT_EQ(traffic.bytes, hops * kStateBytes) << "rank " << r;
        EXPECT_EQ(run.traffic[static_cast<std::size_t>(r)].traffic().size(), P > 1 ? 1U : 0U);
    }
}

TEST_P(EveryRankCount, AllGatherSendsEachSummaryToEveryOtherRank) {
    const int P = GetParam();
    const ShardedRun run = run_sharded(
        one_document(P), Parallel{.linear_attention_mode = LinearAttentionMode::kAllGather},
        gdn_inputs(at::kBFloat16), gdn_op);
    for (const Recorder& recorder : run.traffic) {
        const std::int64_t gathers = P > 1 ? 1 : 0;
        EXPECT_EQ(recorder.of("gdn_summary").messages, gathers);
        EXPECT_EQ(recorder.of("gdn_summary").bytes, (P - 1) * (kStateBytes + kMatrixBytes));
        EXPECT_EQ(recorder.of("gdn_gradient_summary").messages, gathers);
        EXPECT_EQ(recorder.of("gdn_gradient_summary").bytes, (P - 1) * kStateBytes);
    }
}

TEST_P(EveryRankCount, HaloSendsThreeRowsToTheSuccessor) {
    const int P = GetParam();
    constexpr std::int64_t kChannels = 6;
    const OpInputs inputs{.tokens = {random({kTokens, kChannels}, at::kBFloat16)},
                          .weights = {random({kChannels, kConvWidth})},
                          .d_output = random({kTokens, kChannels}, at::kBFloat16)};
    const ShardedRun run =
        run_sharded(one_document(P), Parallel{}, inputs,
                    [](const std::vector<at::Tensor>& x, const CpContext& context) {
                        return causal_conv_silu_cp(shard(x[0], context), x[1], context).local;
                    });
    for (int r = 0; r < P; ++r) {
        const std::int64_t hops = (r + 1 < P ? 1 : 0) + (r > 0 ? 1 : 0);
        const OpTraffic traffic = run.traffic[static_cast<std::size_t>(r)].of("conv_halo");
        EXPECT_EQ(traffic.messages, hops);
        EXPECT_EQ(traffic.bytes, hops * (kConvWidth - 1) * kChannels * 2);
    }
}

TEST_P(EveryRankCount, UlyssesSendsTheHeadsOfOtherRanks) {
    const int P = GetParam();
    if (kValueHeads % P != 0) {
        return;  // refused by check_support
    }
    const ShardedRun run = run_sharded(
        one_document(P), Parallel{.linear_attention_mode = LinearAttentionMode::kUlysses},
        gdn_inputs(at::kFloat), gdn_op);
    const std::int64_t T_local = kTokens / P;
    const std::int64_t value_heads_elsewhere = kValueHeads - kValueHeads / P;
    const std::int64_t key_heads_per_rank = std::max<std::int64_t>(1, kKeyHeads / P);
    const std::int64_t q_k =
        2 * key_heads_per_rank * (P - 1) * kKeyDim;  // shared key heads go along
    const std::int64_t v_g_beta = value_heads_elsewhere * (kValueDim + 2);
    const std::int64_t o =
        (P - 1) * T_local * (kValueHeads / P) * kValueDim;  // other ranks' tokens, own heads
    const std::int64_t one_way = T_local * (q_k + v_g_beta) + o;
    // Backward: dO to head shards, the gradients of the inputs back.
    const std::int64_t d_inputs =
        (P - 1) * T_local * (2 * key_heads_per_rank * kKeyDim + kValueHeads / P * (kValueDim + 2));
    const std::int64_t back = T_local * value_heads_elsewhere * kValueDim + d_inputs;
    for (const Recorder& recorder : run.traffic) {
        EXPECT_EQ(recorder.of("gdn_ulysses").messages, P > 1 ? 4 : 0);
        EXPECT_EQ(recorder.of("gdn_ulysses").bytes, (one_way + back) * 4);
    }
}

TEST_P(EveryRankCount, AttentionSendsKeysAndValuesOnceEachWay) {
    const int P = GetParam();
    constexpr std::int64_t kHeadDim = 8;
    constexpr std::int64_t kKvHeads = 2;
    const OpInputs inputs{
        .tokens = {random({kTokens, 4, kHeadDim}), random({kTokens, kKvHeads, kHeadDim}),
                   random({kTokens, kKvHeads, kHeadDim})},
        .weights = {},
        .d_output = random({kTokens, 4, kHeadDim})};
    const Layout layout = one_document(P);
    const ShardedRun run =
        run_sharded(layout, Parallel{.full_attention_mode = FullAttentionMode::kAllGather}, inputs,
                    [](const std::vector<at::Tensor>& x, const CpContext& context) {
                        return causal_attention_cp(shard(x[0], context), shard(x[1], context),
                                                   shard(x[2], context), 0.3, context)
                            .local;
                    });
    std::int64_t longest = 0;
    for (int r = 0; r < P; ++r) {
        longest = std::max(longest, layout.num_local_tokens(r));
    }
    const std::int64_t row_bytes = kKvHeads * 2 * kHeadDim * 4;
    for (int r = 0; r < P; ++r) {
        const std::int64_t others = kTokens - layout.num_local_tokens(r);
        EXPECT_EQ(run.traffic[static_cast<std::size_t>(r)].of("attention_kv").messages,
                  P > 1 ? 3 : 0);
        EXPECT_EQ(run.traffic[static_cast<std::size_t>(r)].of("attention_kv").bytes,
                  P > 1 ? (2 * (P - 1) * longest + others) * row_bytes : 0);
    }
}

TEST_P(EveryRankCount, RingOnZigzagSendsThreeQuartersOfAPlainRing) {
    const int P = GetParam();
    constexpr std::int64_t kHeadDim = 8;
    constexpr std::int64_t kKvHeads = 2;
    const std::int64_t chunk = 6;
    const std::int64_t T = 2 * P * chunk;
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        const OpInputs inputs{
            .tokens = {random({T, 4, kHeadDim}, dtype), random({T, kKvHeads, kHeadDim}, dtype),
                       random({T, kKvHeads, kHeadDim}, dtype)},
            .weights = {},
            .d_output = random({T, 4, kHeadDim}, dtype)};
        const Layout layout =
            Layout::make({.kind = LayoutKind::kZigzag, .num_ranks = P, .document_lengths = {T}});
        std::vector<OpTraffic> forward(static_cast<std::size_t>(P));
        const ShardedRun run = run_sharded(
            layout, Parallel{.full_attention_mode = FullAttentionMode::kRing}, inputs,
            [&](const std::vector<at::Tensor>& x, const CpContext& context) {
                const at::Tensor o = causal_attention_cp(shard(x[0], context), shard(x[1], context),
                                                         shard(x[2], context), 0.3, context)
                                         .local;
                forward[static_cast<std::size_t>(context.group->rank())] =
                    context.group->recorder().of("attention_ring");
                return o;
            });
        const std::int64_t row_numel = kKvHeads * 2 * kHeadDim;
        const std::int64_t row_bytes =
            row_numel * static_cast<std::int64_t>(at::elementSize(dtype));
        std::int64_t sent = 0;
        for (int r = 0; r < P; ++r) {
            const auto i = static_cast<std::size_t>(r);
            EXPECT_EQ(forward[i].messages, P - 1);
            const std::int64_t back_halves = r == 0 ? 0 : P - r;
            EXPECT_EQ(forward[i].bytes, (P - 1 + back_halves) * chunk * row_bytes) << "rank " << r;
            sent += forward[i].bytes;
            // Backward: the same again, and fp32 gradients: from r, all rows of the P - 1 - r ranks
            // above it and the front half of the r below.
            EXPECT_EQ(run.traffic[i].of("attention_ring").messages, 2 * (P - 1));
            EXPECT_EQ(run.traffic[i].of("attention_ring").bytes, 2 * forward[i].bytes);
            const OpTraffic gradients = run.traffic[i].of("attention_ring_gradient");
            EXPECT_EQ(gradients.messages, P - 1);
            EXPECT_EQ(gradients.bytes, (2 * (P - 1 - r) + r) * chunk * row_numel * 4);
            EXPECT_EQ(run.traffic[i].traffic().size(), P > 1 ? 2U : 0U);
        }
        EXPECT_EQ(4 * sent, P * 3 * (P - 1) * (2 * chunk) * row_bytes);
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, EveryRankCount, ::testing::Values(1, 2, 3, 4, 5, 8));

std::int64_t resident_kilobytes() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with("VmRSS:")) {
            return std::stoll(line.substr(6));
        }
    }
    return 0;
}

TEST(ManyPasses, FiftyPassesOfEveryModeGiveTheSameBitsAndDoNotGrow) {
    at::set_num_threads(1);
    at::manual_seed(4);
    const OpInputs inputs = gdn_inputs(at::kFloat);
    const Layout layout = one_document(4);
    for (const LinearAttentionMode mode :
         {LinearAttentionMode::kP2p, LinearAttentionMode::kAllGather, LinearAttentionMode::kScan,
          LinearAttentionMode::kUlysses}) {
        (void)run_sharded(layout, Parallel{.linear_attention_mode = mode}, inputs, gdn_op, 5);
        const std::int64_t before = resident_kilobytes();
        (void)run_sharded(layout, Parallel{.linear_attention_mode = mode}, inputs, gdn_op, 50);
        EXPECT_LE(resident_kilobytes() - before, 8 * 1024) << "mode " << static_cast<int>(mode);
    }
}

TEST(ManyPasses, FiftyPassesOfEveryAttentionModeGiveTheSameBitsAndDoNotGrow) {
    at::set_num_threads(1);
    at::manual_seed(4);
    const OpInputs inputs{
        .tokens = {random({kTokens, 4, 8}), random({kTokens, 2, 8}), random({kTokens, 2, 8})},
        .weights = {},
        .d_output = random({kTokens, 4, 8})};
    const Op op = [](const std::vector<at::Tensor>& x, const CpContext& context) {
        return causal_attention_cp(shard(x[0], context), shard(x[1], context), shard(x[2], context),
                                   0.3, context)
            .local;
    };
    for (const FullAttentionMode mode :
         {FullAttentionMode::kUlysses, FullAttentionMode::kAllGather, FullAttentionMode::kRing}) {
        const Parallel parallel{.full_attention_mode = mode};
        const Layout layout = mode == FullAttentionMode::kRing
                                  ? Layout::make({.kind = LayoutKind::kZigzag,
                                                  .num_ranks = 4,
                                                  .document_lengths = {kTokens - 23, 23}})
                                  : one_document(4);
        (void)run_sharded(layout, parallel, inputs, op, 5);
        const std::int64_t before = resident_kilobytes();
        (void)run_sharded(layout, parallel, inputs, op, 50);
        EXPECT_LE(resident_kilobytes() - before, 8 * 1024) << "mode " << static_cast<int>(mode);
    }
}

}  // namespace
}  // namespace hybridcp::testing
