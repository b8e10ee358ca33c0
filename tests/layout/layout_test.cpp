#include "hybridcp/layout.h"

#include <gtest/gtest.h>

#include <set>

#include "hybridcp/error.h"
#include "layout/layout_cases.h"

namespace hybridcp {
namespace {

using testing::describe;
using testing::Lengths;

std::vector<std::int64_t> segment_lengths(const Layout& layout, int rank) {
    std::vector<std::int64_t> lengths;
    for (const Segment& segment : layout.segments(rank)) {
        lengths.push_back(segment.size());
    }
    return lengths;
}

TEST(Layout, EveryTokenHasOneOwner) {
    std::int64_t num_layouts = 0;
    testing::for_each_small_layout([&](const Layout& layout) {
        ++num_layouts;
        std::vector<int> owners(static_cast<std::size_t>(layout.num_tokens()), 0);
        for (int rank = 0; rank < layout.num_ranks(); ++rank) {
            for (const std::int64_t flat : layout.flat_indices(rank)) {
                ++owners[static_cast<std::size_t>(flat)];
            }
        }
        EXPECT_EQ(owners, std::vector<int>(owners.size(), 1)) << describe(layout);
    });
    EXPECT_EQ(num_layouts, 400 * 5 * 8);
}

TEST(Layout, FlatIndicesAndPositionsNameTheSameTokens) {
    testing::for_each_small_layout([](const Layout& layout) {
        const auto& offsets = layout.document_offsets();
        for (int rank = 0; rank < layout.num_ranks(); ++rank) {
            const std::vector<std::int64_t> flat = layout.flat_indices(rank);
            const std::vector<std::int64_t> positions = layout.positions(rank);
            ASSERT_EQ(flat.size(), positions.size());
            ASSERT_EQ(static_cast<std::int64_t>(flat.size()), layout.num_local_tokens(rank));
            EXPECT_TRUE(std::is_sorted(flat.begin(), flat.end())) << describe(layout);
            for (std::size_t i = 0; i < flat.size(); ++i) {
                const auto after = std::upper_bound(offsets.begin(), offsets.end(), flat[i]);
                EXPECT_EQ(positions[i], flat[i] - *(after - 1)) << describe(layout);
            }
        }
    });
}

TEST(Layout, SegmentsAndChainsAreTwoViewsOfTheSame) {
    testing::for_each_small_layout([](const Layout& layout) {
        std::vector<std::int64_t> next_local(static_cast<std::size_t>(layout.num_ranks()), 0);
        std::vector<std::size_t> next_segment(next_local.size(), 0);
        for (std::int64_t doc = 0; doc < layout.num_documents(); ++doc) {
            std::int64_t pos = 0;
            for (const Segment& segment : layout.chain(doc)) {
                const auto rank = static_cast<std::size_t>(segment.rank);
                EXPECT_EQ(segment, layout.segments(segment.rank)[next_segment[rank]++]);
                EXPECT_EQ(segment.doc, doc);
                EXPECT_EQ(segment.chain_pos, pos++);
                EXPECT_GT(segment.size(), 0);
                EXPECT_EQ(segment.local_begin, next_local[rank]);
                next_local[rank] += segment.size();
            }
        }
        for (int rank = 0; rank < layout.num_ranks(); ++rank) {
            const auto i = static_cast<std::size_t>(rank);
            EXPECT_EQ(next_segment[i], layout.segments(rank).size());
            EXPECT_EQ(next_local[i], layout.num_local_tokens(rank));
        }
    });
}

TEST(Layout, DocumentCutIsTheFormula) {
    const Layout layout = Layout::make({.num_ranks = 4, .document_lengths = {10, 0, 3, 1}});
    // Tokens that do not divide go to chunks 0 2 4 6 1 3 5 7 0 ... in turn; rank r holds chunks 2r
    // and 2r+1. 10 = 8 + 2: chunks 0 and 2; 3: chunks 4, 6 and 1; 1: chunk 3.
    EXPECT_EQ(segment_lengths(layout, 0), (Lengths{3, 1}));
    EXPECT_EQ(segment_lengths(layout, 1), (Lengths{3, 1}));
    EXPECT_EQ(segment_lengths(layout, 2), (Lengths{2, 1}));
    EXPECT_EQ(segment_lengths(layout, 3), (Lengths{2, 1}));
    EXPECT_EQ(layout.flat_indices(3), (Lengths{8, 9, 12}));
    EXPECT_EQ(layout.positions(3), (Lengths{8, 9, 2}));
    EXPECT_EQ(layout.document_offsets(), (Lengths{0, 10, 10, 13, 14}));
    EXPECT_TRUE(layout.chain(1).empty());
}

TEST(Layout, ShardsAreAsGiven) {
    const Layout layout = Layout::make({.cut = LayoutCut::kRow,
                                        .num_ranks = 3,
                                        .document_lengths = {4, 5},
                                        .shard_lengths = {1, 0, 8}});
    EXPECT_EQ(layout.num_local_tokens(0), 1);
    EXPECT_TRUE(layout.segments(1).empty());
    EXPECT_EQ(segment_lengths(layout, 2), (Lengths{3, 5}));
}

TEST(Layout, HashTellsLayoutsApart) {
    std::set<std::uint64_t> hashes;
    const std::vector<LayoutOptions> all = {
        {},
        {.num_ranks = 2, .document_lengths = {}},
        {.document_lengths = {0}},
        {.num_ranks = 2, .document_lengths = {4}},
        {.num_ranks = 2, .document_lengths = {5}},
        {.num_ranks = 2, .document_lengths = {4, 0}},
        {.num_ranks = 2, .document_lengths = {0, 4}},
        {.num_ranks = 2, .document_lengths = {2, 2}},
        {.cut = LayoutCut::kRow, .num_ranks = 2, .document_lengths = {2, 2}},
        {.cut = LayoutCut::kRow,
         .num_ranks = 2,
         .document_lengths = {2, 2},
         .shard_lengths = {1, 3}},
    };
    for (const LayoutOptions& options : all) {
        hashes.insert(Layout::make(options).hash());
        EXPECT_EQ(Layout::make(options).hash(), Layout::make(options).hash());
    }
    EXPECT_EQ(hashes.size(), all.size());
    // The value itself is pinned: ranks of different builds compare it.
    EXPECT_EQ(Layout::make({.num_ranks = 2, .document_lengths = {4}}).hash(),
              1040851699480320481ULL);
}

void expect_refusal(const LayoutOptions& options, const std::string& part) {
    try {
        (void)Layout::make(options);
        FAIL() << "accepted; expected: " << part;
    } catch (const UsageError& error) {
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
}

TEST(Layout, RefusesWhatItCannotBuild) {
    expect_refusal({.num_ranks = 0, .document_lengths = {}}, "number of ranks");
    expect_refusal({.document_lengths = {3, -1}}, "must not be negative");
    expect_refusal({.num_ranks = 2, .document_lengths = {4}, .shard_lengths = {2, 2}}, "cut 'row'");
    LayoutOptions shards{.cut = LayoutCut::kRow, .num_ranks = 2, .document_lengths = {4}};
    shards.shard_lengths = {4};
    expect_refusal(shards, "one shard length per rank");
    shards.shard_lengths = {1, 2};
    expect_refusal(shards, "add up");
    shards.shard_lengths = {5, -1};
    expect_refusal(shards, "must not be negative");
}

TEST(Layout, ChainsMustCoverTheirDocument) {
    const LayoutOptions options{.num_ranks = 2, .document_lengths = {4}};
    const auto build = [&](std::vector<Segment> chain) {
        return Layout::from_chains(options, {std::move(chain)});
    };
    EXPECT_NO_THROW((void)build({{.begin = 0, .end = 3, .rank = 1}, {.begin = 3, .end = 4}}));
    EXPECT_THROW((void)build({{.begin = 0, .end = 3}}), UsageError);
    EXPECT_THROW((void)build({{.begin = 1, .end = 4}}), UsageError);
    EXPECT_THROW((void)build({{.begin = 0, .end = 3}, {.begin = 2, .end = 4}}), UsageError);
    EXPECT_THROW((void)build({{.begin = 0, .end = 4, .rank = 2}}), UsageError);
    EXPECT_THROW((void)Layout::from_chains(options, {}), UsageError);
}

}  // namespace
}  // namespace hybridcp
