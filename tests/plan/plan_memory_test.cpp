// The plan by itself: its book, and what must hold whatever the sizes. tests/train/
// memory_plan_test.cpp compares it with what a step takes.
#include <gtest/gtest.h>

#include <numeric>

#include "hybridcp/error.h"
#include "plan/memory_plan.h"

namespace hybridcp::plan {
namespace {

constexpr std::int64_t kVocabulary = 1000, kHidden = 64;

/// Every fourth layer is full attention; parameters are one matrix a block.
MemoryPlanInput make_input(std::int64_t num_layers = 8) {
    MemoryPlanInput input{.model = {.vocabulary = kVocabulary,
                                    .hidden = kHidden,
                                    .intermediate = 192,
                                    .layers = {},
                                    .query_heads = 4,
                                    .kv_heads = 2,
                                    .head_dim = 32,
                                    .rotary_dim = 16,
                                    .key_heads = 2,
                                    .value_heads = 4,
                                    .key_dim = 32,
                                    .value_dim = 32,
                                    .parameters = {}},
                          .row_tokens = 4096};
    input.model.parameters.push_back({.unit = 0, .numel = kVocabulary * kHidden});
    for (std::int64_t layer = 0; layer < num_layers; ++layer) {
        input.model.layers.push_back(layer % 4 == 3 ? Mixer::kFullAttention
                                                    : Mixer::kLinearAttention);
        input.model.parameters.push_back({.unit = layer + 1, .numel = 100'000});
        input.model.parameters.push_back({.unit = layer + 1, .numel = 64, .is_narrow = false});
    }
    input.model.parameters.push_back({.unit = num_layers + 1, .numel = kVocabulary * kHidden});
    input.fused_gdn = true;
    return input;
}

std::int64_t own_peak(const PeakMemory& peak, MemoryClass memory_class) {
    return peak.class_peak_bytes.at(index_of(memory_class));
}

std::int64_t numel(const MemoryPlanInput& input) {
    return std::accumulate(
        input.model.parameters.begin(), input.model.parameters.end(), std::int64_t{0},
        [](std::int64_t sum, const PlannedParameter& each) { return sum + each.numel; });
}

TEST(MemoryLedger, KeepsTheMomentOfThePeak) {
    MemoryLedger ledger;
    ledger.begin("first");
    MemoryLedger::Held a = ledger.take(MemoryClass::kStream, 10);
    {
        ledger.begin("second");
        MemoryLedger::Held b = ledger.take(MemoryClass::kExchange, 5);
        const MemoryLedger::Held again = b;
        b.reset();  // the other still holds it
        EXPECT_EQ(ledger.live_bytes(MemoryClass::kExchange), 5);
    }
    ledger.begin("third");
    a.reset();
    EXPECT_EQ(ledger.live_bytes(MemoryClass::kStream), 0);
    (void)ledger.take(MemoryClass::kExchange, 14);
    EXPECT_EQ(ledger.peak().total_bytes, 15);
    EXPECT_EQ(ledger.peak().moment, "second");
    EXPECT_EQ(ledger.peak().at_peak_bytes.at(index_of(MemoryClass::kStream)), 10);
    EXPECT_EQ(own_peak(ledger.peak(), MemoryClass::kExchange), 14);
}

TEST(MemoryPlan, ClassesAddUpToTheTotal) {
    const PeakMemory peak = plan_memory(make_input());
    EXPECT_EQ(
        std::accumulate(peak.at_peak_bytes.begin(), peak.at_peak_bytes.end(), std::int64_t{0}),
        peak.total_bytes);
}

TEST(MemoryPlan, WholeStateIsSixteenBytesAParameter) {
    const MemoryPlanInput input = make_input();
    const PeakMemory peak = plan_memory(input);
    EXPECT_EQ(own_peak(peak, MemoryClass::kParameters), 4 * numel(input));
    EXPECT_GE(own_peak(peak, MemoryClass::kOptimizer), 8 * numel(input));
    EXPECT_LE(own_peak(peak, MemoryClass::kOptimizer), 8 * numel(input) + 400'000);
}

TEST(MemoryPlan, ShardedStateFallsWithTheRanks) {
    for (const std::int64_t ranks : {1, 2, 4, 8}) {
        MemoryPlanInput input = make_input();
        input.cp = ranks;
        input.linear_mode = LinearMode::kP2p;
        input.full_mode = FullMode::kRing;
        input.sharded = true;
        input.shard_size = ranks;
        const PeakMemory peak = plan_memory(input);
        const auto moments = static_cast<double>(8 * numel(input)) / static_cast<double>(ranks);
        const double largest = 4.0 * 100'000 / static_cast<double>(ranks);
        EXPECT_NEAR(static_cast<double>(own_peak(peak, MemoryClass::kOptimizer)), moments + largest,
                    0.01 * moments)
            << ranks;
    }
}

TEST(MemoryPlan, FullCheckpointingKeepsTheStreamAndOneBlock) {
    MemoryPlanInput input = make_input();
    input.checkpointing = Checkpointing::kFull;
    const PeakMemory peak = plan_memory(input);
    MemoryPlanInput short_input = make_input(4);
    short_input.checkpointing = Checkpointing::kFull;
    const PeakMemory of_four = plan_memory(short_input);
    for (const MemoryClass kind : {MemoryClass::kLinearAttention, MemoryClass::kFeedForward}) {
        EXPECT_EQ(own_peak(peak, kind), own_peak(of_four, kind));
    }
    const std::int64_t stream_bytes = 4 * input.row_tokens * kHidden;
    EXPECT_EQ(own_peak(peak, MemoryClass::kStream) - own_peak(of_four, MemoryClass::kStream),
              4 * stream_bytes);
    // The output of each full-attention layer is kept.
    EXPECT_EQ(own_peak(peak, MemoryClass::kFullAttention) -
                  own_peak(of_four, MemoryClass::kFullAttention),
              4 * input.row_tokens * 4 * 32);
}

TEST(MemoryPlan, LogitsDoNotGrowWithTheTokens) {
    MemoryPlanInput input = make_input();
    input.model.vocabulary = 248320;
    const auto logits = [&](std::int64_t tokens) {
        input.row_tokens = tokens;
        return own_peak(plan_memory(input), MemoryClass::kLogits) - 4 * tokens * kHidden;
    };
    EXPECT_EQ(logits(2048), logits(65536));
}

TEST(MemoryPlan, RefusesAParameterOfNoLayer) {
    MemoryPlanInput input = make_input();
    input.model.layers.pop_back();
    EXPECT_THROW((void)plan_memory(input), Error);
}

TEST(MemoryAdvice, LowersThePeakTheBestFirst) {
    MemoryPlanInput input = make_input();
    input.cp = 4;
    input.full_mode = FullMode::kAllGather;
    input.linear_mode = LinearMode::kGatherHidden;
    const std::int64_t now_bytes = plan_memory(input).total_bytes;
    const std::vector<Advice> advice = memory_advice(input);
    ASSERT_GE(advice.size(), 4U);
    std::int64_t before = 0;
    for (const Advice& each : advice) {
        EXPECT_LT(each.total_bytes, now_bytes) << each.change;
        EXPECT_GE(each.total_bytes, before) << each.change;
        before = each.total_bytes;
    }
}

}  // namespace
}  // namespace hybridcp::plan
