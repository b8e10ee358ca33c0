// The support matrix says yes, or names the rule and the nearest choice.

#include <gtest/gtest.h>

#include "hybridcp/error.h"
#include "hybridcp/parallel.h"

namespace hybridcp {
namespace {

const HeadCounts kHeads{
    .linear_key_heads = 4, .linear_value_heads = 8, .query_heads = 4, .kv_heads = 2};

struct Refusal {
    const char* name;
    void (*change)(ParallelOptions&);
    const char* rule;
    const char* nearest;
};

class Refused : public ::testing::TestWithParam<Refusal> {};

TEST_P(Refused, NamesTheRuleAndTheNearestChoice) {
    ParallelOptions options;
    options.cp = 4;
    ASSERT_TRUE(check_support(options, kHeads, "bf16").supported);
    GetParam().change(options);
    const Support support = check_support(options, kHeads, "bf16");
    EXPECT_FALSE(support.supported);
    EXPECT_NE(support.rule.find(GetParam().rule), std::string::npos) << support.rule;
    EXPECT_EQ(support.nearest, GetParam().nearest);
    EXPECT_THROW((void)make_parallel(options, kHeads, "bf16"), UsageError);
}

INSTANTIATE_TEST_SUITE_P(
    Rules,
    Refused,
    ::testing::Values(
        Refusal{"UnknownLinearMode",
                [](ParallelOptions& o) { o.linear_attention_cp_mode = "p2pp"; }, "p2pp is unknown",
                "linear_attention_cp_mode: p2p"},
        Refusal{"UnknownFullMode",
                [](ParallelOptions& o) { o.full_attention_cp_mode = "allgather"; },
                "allgather is unknown", "full_attention_cp_mode: all_gather"},
        Refusal{"Triton", [](ParallelOptions& o) { o.linear_attention_gdn_backend = "triton"; },
                "fused is meant", "linear_attention_gdn_backend: fused"},
        Refusal{"UnknownBackend",
                [](ParallelOptions& o) { o.linear_attention_gdn_backend = "eagre"; },
                "eagre is unknown", "linear_attention_gdn_backend: eager"},
        Refusal{"Tp", [](ParallelOptions& o) { o.tp = 2; }, "tp: 2", "tp: 1"},
        Refusal{"ShardSizeWithoutFsdp", [](ParallelOptions& o) { o.fsdp_shard_size = 2; },
                "ignored", "fsdp: true"},
        Refusal{"ShardSize",
                [](ParallelOptions& o) {
                    o.fsdp = true;
                    o.fsdp_shard_size = 3;
                },
                "does not divide", "fsdp_shard_size: 1"},
        Refusal{"UlyssesDegree", [](ParallelOptions& o) { o.ulysses_degree = 2; },
                "ulysses_degree: 2", "ulysses_degree: 4"},
        Refusal{"QueryHeads",
                [](ParallelOptions& o) {
                    o.cp = 8;
                    o.linear_attention_cp_mode = "p2p";
                },
                "4 query heads over cp: 8", "full_attention_cp_mode: all_gather"},
        Refusal{"ValueHeads",
                [](ParallelOptions& o) {
                    o.cp = 3;
                    o.full_attention_cp_mode = "all_gather";
                },
                "8 value heads over cp: 3", "linear_attention_cp_mode: p2p"},
        Refusal{"Zigzag", [](ParallelOptions& o) { o.sequence_layout = "zig_zag"; }, "is unknown",
                "sequence_layout: zigzag"},
        Refusal{"Convert", [](ParallelOptions& o) { o.linear_attention_layout = "converted"; },
                "is unknown", "linear_attention_layout: convert"},
        Refusal{"Summary", [](ParallelOptions& o) { o.linear_attention_summary = "exactly"; },
                "is unknown", "linear_attention_summary: exact"},
        Refusal{"Cut", [](ParallelOptions& o) { o.layout_cut = "rows"; }, "rows is unknown",
                "layout_cut: row"},
        Refusal{"Device", [](ParallelOptions& o) { o.device = "gpu"; }, "gpu is unknown",
                "device: cpu"},
        Refusal{"Cp", [](ParallelOptions& o) { o.cp = 0; }, "at least 1", "dp: 1, cp: 1"}),
    [](const auto& test) { return test.param.name; });

TEST(Supported, UnknownDtypeIsRefused) {
    const Support support = check_support(ParallelOptions{}, kHeads, "bfloat16");
    EXPECT_FALSE(support.supported);
    EXPECT_EQ(support.nearest, "dtype: bf16");
}

TEST(Supported, EveryModeWhereHeadsDivide) {
    for (const char* linear : {"ulysses", "p2p", "all_gather"}) {
        for (const char* full : {"ulysses", "all_gather", "ring"}) {
            for (const char* cut : {"document", "row"}) {
                ParallelOptions options;
                options.cp = 4;
                options.ulysses_degree = 4;
                options.linear_attention_cp_mode = linear;
                options.full_attention_cp_mode = full;
                options.layout_cut = cut;
                EXPECT_TRUE(check_support(options, kHeads, "fp32").supported);
                const Parallel parallel = make_parallel(options, kHeads, "fp32");
                EXPECT_EQ(parallel.linear_attention_mode == LinearAttentionMode::kP2p,
                          std::string(linear) == "p2p");
                EXPECT_EQ(parallel.full_attention_mode == FullAttentionMode::kAllGather,
                          std::string(full) == "all_gather");
                EXPECT_EQ(parallel.full_attention_mode == FullAttentionMode::kRing,
                          std::string(full) == "ring");
                EXPECT_EQ(parallel.layout_cut == LayoutCut::kRow, std::string(cut) == "row");
            }
        }
    }
}

}  // namespace
}  // namespace hybridcp
