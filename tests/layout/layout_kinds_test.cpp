// What the kinds of layout promise, for one to nine and sixteen ranks and thousands of document
// lists: every token has one owner, chains are in causal order, shards are even, zigzag balances
// causal attention.
#include <gtest/gtest.h>

#include "hybridcp/error.h"
#include "layout/causal_work.h"
#include "layout/chunks.h"
#include "layout/layout_cases.h"

namespace hybridcp {
namespace {

using testing::describe;
using testing::kKinds;
using testing::kRankCounts;
using testing::Lengths;

constexpr int kListsPerRankCount = 300;

void for_each_generated_list(const std::function<void(const Lengths&, int num_ranks)>& visit) {
    std::mt19937 random(2);
    for (const int num_ranks : kRankCounts) {
        for (const Lengths& documents :
             testing::generated_document_lists(kListsPerRankCount, num_ranks, random)) {
            visit(documents, num_ranks);
        }
    }
}

void for_each_generated_layout(const std::function<void(const Layout&)>& visit) {
    std::mt19937 random(3);
    for_each_generated_list([&](const Lengths& documents, int num_ranks) {
        for (const Layout& layout : testing::all_layouts(documents, num_ranks, random)) {
            visit(layout);
        }
    });
}

Layout make(LayoutKind kind, LayoutCut cut, int num_ranks, const Lengths& documents) {
    return Layout::make(
        {.kind = kind, .cut = cut, .num_ranks = num_ranks, .document_lengths = documents});
}

std::int64_t total(const Lengths& lengths) {
    return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
}

TEST(LayoutKinds, OwnershipIsAPartition) {
    std::int64_t num_layouts = 0;
    for_each_generated_layout([&](const Layout& layout) {
        ++num_layouts;
        std::vector<int> owners(static_cast<std::size_t>(layout.num_tokens()), 0);
        for (int rank = 0; rank < layout.num_ranks(); ++rank) {
            for (const std::int64_t flat : layout.flat_indices(rank)) {
                ++owners[static_cast<std::size_t>(flat)];
            }
        }
        ASSERT_TRUE(std::all_of(owners.begin(), owners.end(), [](int n) { return n == 1; }))
            << describe(layout);
    });
    EXPECT_EQ(num_layouts, 10 * kListsPerRankCount * 8);
}

// Walks each chain and takes, from the rank that it names, that rank's next local token: every
// token once, in causal order, and nothing is left over.
TEST(LayoutKinds, ChainsVisitEveryTokenOnceInCausalOrder) {
    for_each_generated_layout([](const Layout& layout) {
        std::vector<Lengths> flat;
        flat.reserve(static_cast<std::size_t>(layout.num_ranks()));
        for (int rank = 0; rank < layout.num_ranks(); ++rank) {
            flat.push_back(layout.flat_indices(rank));
        }
        std::vector<std::int64_t> next_local(flat.size(), 0);
        std::int64_t expected = 0;
        for (std::int64_t doc = 0; doc < layout.num_documents(); ++doc) {
            std::int64_t chain_pos = 0;
            for (const Segment& segment : layout.chain(doc)) {
                const auto rank = static_cast<std::size_t>(segment.rank);
                ASSERT_EQ(segment.chain_pos, chain_pos++) << describe(layout);
                ASSERT_EQ(segment.local_begin, next_local[rank]) << describe(layout);
                for (std::int64_t i = 0; i < segment.size(); ++i) {
                    const auto local = static_cast<std::size_t>(next_local[rank]++);
                    ASSERT_EQ(flat[rank].at(local), expected++) << describe(layout);
                }
            }
        }
        ASSERT_EQ(expected, layout.num_tokens());
    });
}

TEST(LayoutKinds, EveryRankHoldsItsPartToOneToken) {
    for_each_generated_list([](const Lengths& documents, int num_ranks) {
        const std::int64_t num_tokens = total(documents);
        for (const LayoutKind kind : kKinds) {
            for (const LayoutCut cut : {LayoutCut::kDocument, LayoutCut::kRow}) {
                const Layout layout = make(kind, cut, num_ranks, documents);
                for (int rank = 0; rank < num_ranks; ++rank) {
                    ASSERT_GE(layout.num_local_tokens(rank), num_tokens / num_ranks)
                        << describe(layout);
                    ASSERT_LE(layout.num_local_tokens(rank),
                              (num_tokens + num_ranks - 1) / num_ranks)
                        << describe(layout);
                }
            }
        }
    });
}

TEST(LayoutKinds, ChunksOfADocumentDifferByOneTokenAtMost) {
    for (const int num_ranks : kRankCounts) {
        const std::int64_t num_chunks = std::int64_t{2} * num_ranks;
        for (std::int64_t length = 0; length <= 3 * num_chunks; ++length) {
            for (std::int64_t offset = 0; offset <= num_chunks; ++offset) {
                const Lengths boundaries = chunk_boundaries(length, num_ranks, offset);
                ASSERT_EQ(boundaries.size(), static_cast<std::size_t>(num_chunks + 1));
                EXPECT_EQ(boundaries.front(), 0);
                EXPECT_EQ(boundaries.back(), length);
                for (std::size_t chunk = 1; chunk < boundaries.size(); ++chunk) {
                    const std::int64_t size = boundaries[chunk] - boundaries[chunk - 1];
                    EXPECT_GE(size, length / num_chunks);
                    EXPECT_LE(size, (length + num_chunks - 1) / num_chunks);
                }
            }
        }
    }
}

TEST(LayoutKinds, RanksOfChunks) {
    EXPECT_EQ(chunk_ranks(LayoutKind::kContiguous, 4), (std::vector{0, 0, 1, 1, 2, 2, 3, 3}));
    EXPECT_EQ(chunk_ranks(LayoutKind::kZigzag, 4), (std::vector{0, 1, 2, 3, 3, 2, 1, 0}));
    EXPECT_EQ(chunk_ranks(LayoutKind::kFolded, 4), (std::vector{0, 0, 2, 2, 3, 3, 1, 1}));
    EXPECT_EQ(chunk_ranks(LayoutKind::kFolded, 5), (std::vector{0, 0, 2, 2, 4, 4, 3, 3, 1, 1}));
    EXPECT_EQ(chunk_ranks(LayoutKind::kZigzag, 1), (std::vector{0, 0}));
    for (const int num_ranks : kRankCounts) {
        for (const LayoutKind kind : kKinds) {
            const std::vector<int> ranks = chunk_ranks(kind, num_ranks);
            for (int rank = 0; rank < num_ranks; ++rank) {
                const auto first = std::find(ranks.begin(), ranks.end(), rank);
                const auto second = std::find(first + 1, ranks.end(), rank);
                ASSERT_NE(second, ranks.end());
                EXPECT_EQ(std::count(ranks.begin(), ranks.end(), rank), 2);
                EXPECT_EQ((second - first) % 2, 1);  // an even chunk and an odd one
            }
        }
    }
}

TEST(LayoutKinds, OneSegmentARankUnlessZigzag) {
    for_each_generated_list([](const Lengths& documents, int num_ranks) {
        for (const LayoutKind kind : kKinds) {
            for (const LayoutCut cut : {LayoutCut::kDocument, LayoutCut::kRow}) {
                const Layout layout = make(kind, cut, num_ranks, documents);
                for (std::int64_t doc = 0; doc < layout.num_documents(); ++doc) {
                    std::vector<int> segments(static_cast<std::size_t>(num_ranks), 0);
                    for (const Segment& segment : layout.chain(doc)) {
                        ++segments[static_cast<std::size_t>(segment.rank)];
                    }
                    ASSERT_LE(*std::max_element(segments.begin(), segments.end()),
                              kind == LayoutKind::kZigzag ? 2 : 1)
                        << describe(layout);
                }
            }
        }
    });
}

TEST(LayoutKinds, ARowOfOneDocumentIsCutLikeTheDocument) {
    for (const int num_ranks : kRankCounts) {
        for (std::int64_t length = 0; length <= 100; ++length) {
            for (const LayoutKind kind : kKinds) {
                const Lengths documents{0, length, 0};
                const Layout by_row = make(kind, LayoutCut::kRow, num_ranks, documents);
                const Layout by_document = make(kind, LayoutCut::kDocument, num_ranks, documents);
                EXPECT_TRUE(std::ranges::equal(by_row.chain(1), by_document.chain(1)))
                    << describe(by_row) << " against " << describe(by_document);
            }
        }
    }
}

TEST(LayoutKinds, ThousandsOfOneTokenDocumentsSpreadOverTheRanks) {
    const Lengths documents(5003, 1);
    for (const int num_ranks : kRankCounts) {
        for (const LayoutKind kind : kKinds) {
            const Layout layout = make(kind, LayoutCut::kDocument, num_ranks, documents);
            for (int rank = 0; rank < num_ranks; ++rank) {
                const std::int64_t num_tokens = layout.num_local_tokens(rank);
                EXPECT_TRUE(num_tokens == 5003 / num_ranks || num_tokens == 5003 / num_ranks + 1)
                    << to_string(kind) << ": rank " << rank << " of " << num_ranks << " holds "
                    << num_tokens;
                EXPECT_EQ(causal_work(layout, rank), num_tokens);
            }
        }
    }
}

TEST(CausalWork, IsTheNumberOfVisibleKeys) {
    for_each_generated_layout([](const Layout& layout) {
        std::int64_t all = 0;
        for (int rank = 0; rank < layout.num_ranks(); ++rank) {
            const Lengths positions = layout.positions(rank);
            const std::int64_t work = total(positions) + layout.num_local_tokens(rank);
            ASSERT_EQ(causal_work(layout, rank), work) << describe(layout) << " rank " << rank;
            all += work;
        }
        for (const std::int64_t length : layout.document_lengths()) {
            all -= length * (length + 1) / 2;
        }
        ASSERT_EQ(all, 0);
    });
}

TEST(CausalWork, TakesAsManyTokensAs64BitsAllow) {
    const std::int64_t most = kMaxCausalTokens;
    const auto work = [](std::int64_t length) {
        return causal_work(make(LayoutKind::kZigzag, LayoutCut::kDocument, 1, {length}), 0);
    };
    EXPECT_EQ(work(most), 0x7FFFFFFF80000000);  // most (most + 1) / 2
    EXPECT_EQ(work(most - 1), 0x7FFFFFFF80000000 - most);
    EXPECT_THROW((void)work(most + 1), UsageError);
}

std::int64_t work_spread(const Layout& layout) {
    Lengths work;
    for (int rank = 0; rank < layout.num_ranks(); ++rank) {
        work.push_back(causal_work(layout, rank));
    }
    const auto [least, most] = std::minmax_element(work.begin(), work.end());
    return *most - *least;
}

// How far the causal work of two ranks can be apart in zigzag with cut `document`, in visible keys.
// A document of L = 2Pq + s tokens, s < 2P, has chunks of q + x_c tokens, x_c in {0, 1}; chunk c
// begins at b_c = qc + X_c, X_c = x_0 + ... + x_(c-1). The tokens of chunk c see
//     (q + x_c) b_c + (q + x_c)(q + x_c + 1)/2  =  q^2 c + q(q + 1)/2 + q X_c + x_c b_(c+1)
// keys. Rank r has c = r and c' = 2P-1-r, so the first two terms add up to the same on every rank.
// - If 2P divides L, all x are zero: no difference.
// - Else q (X_c + X_c') differs by at most q(P - 1): from one r to the next X_c grows by 0 or 1 and
//   X_c' falls by 0 or 1. And x_c b_(c+1) + x_c' b_(c'+1) lies between 0 and b_P + b_2P, at most
//   (qP + s) + L. Together at most q(2P - 1) + s + L = 2L - q.
// That is what a token as the smallest unit costs: chunks are even to one token, so the shares of
// two ranks to two tokens, each of which sees up to L keys. Documents add up.
std::int64_t zigzag_work_bound(const Lengths& documents, int num_ranks) {
    const std::int64_t num_chunks = std::int64_t{2} * num_ranks;
    std::int64_t bound = 0;
    for (const std::int64_t length : documents) {
        bound += length % num_chunks == 0 ? 0 : 2 * length - length / num_chunks;
    }
    return bound;
}

TEST(CausalWork, ZigzagDiffersByWhatTheGranularityForces) {
    for_each_generated_list([](const Lengths& documents, int num_ranks) {
        const Layout layout = make(LayoutKind::kZigzag, LayoutCut::kDocument, num_ranks, documents);
        ASSERT_LE(work_spread(layout), zigzag_work_bound(documents, num_ranks)) << describe(layout);
    });
}

TEST(CausalWork, ZigzagOfEveryShortDocumentAndOffset) {
    for (const int num_ranks : kRankCounts) {
        for (std::int64_t length = 0; length <= std::int64_t{6} * num_ranks; ++length) {
            for (std::int64_t offset = 0; offset < std::int64_t{2} * num_ranks; ++offset) {
                // Documents of one token turn the cut of the next by one and work one key each.
                Lengths documents(static_cast<std::size_t>(offset), 1);
                documents.push_back(length);
                const Layout layout =
                    make(LayoutKind::kZigzag, LayoutCut::kDocument, num_ranks, documents);
                EXPECT_LE(work_spread(layout), zigzag_work_bound({length}, num_ranks) + 2)
                    << describe(layout);
            }
        }
    }
}

TEST(CausalWork, ZigzagCutByRowIsBalancedForOneDocument) {
    for (const int num_ranks : kRankCounts) {
        for (std::int64_t length = 0; length <= 200; ++length) {
            const Layout layout = make(LayoutKind::kZigzag, LayoutCut::kRow, num_ranks, {length});
            EXPECT_LE(work_spread(layout), zigzag_work_bound({length}, num_ranks));
        }
    }
    // Documents of different lengths are not balanced by cutting the row: that is what cut
    // `document` is for.
    const Lengths documents{800, 160, 64};
    EXPECT_EQ(work_spread(make(LayoutKind::kZigzag, LayoutCut::kDocument, 4, documents)), 0);
    EXPECT_GT(work_spread(make(LayoutKind::kZigzag, LayoutCut::kRow, 4, documents)), 10000);
}

TEST(CausalWork, OtherKindsAreNotBalanced) {
    for (const int num_ranks : kRankCounts) {
        if (num_ranks == 1) {
            continue;
        }
        const Lengths documents{1000 * 2 * num_ranks + 1};
        for (const LayoutKind kind : {LayoutKind::kContiguous, LayoutKind::kFolded}) {
            const Layout layout = make(kind, LayoutCut::kDocument, num_ranks, documents);
            EXPECT_GT(work_spread(layout), 100 * zigzag_work_bound(documents, num_ranks));
        }
    }
}

}  // namespace
}  // namespace hybridcp
