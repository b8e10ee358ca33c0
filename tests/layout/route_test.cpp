// Routes between every pair of layouts: bijections, inverse to each other, and no more messages
// than the kinds promise.
#include "layout/route.h"

#include <gtest/gtest.h>

#include <set>

#include "hybridcp/error.h"
#include "layout/layout_cases.h"

namespace hybridcp {
namespace {

using testing::describe;
using testing::kRankCounts;
using testing::Lengths;

constexpr int kListsPerRankCount = 300;
constexpr std::size_t kPartnersPerLayout = 3;

std::vector<Route> routes_of_all_ranks(const Layout& from, const Layout& to) {
    std::vector<Route> routes;
    routes.reserve(static_cast<std::size_t>(from.num_ranks()));
    for (int rank = 0; rank < from.num_ranks(); ++rank) {
        routes.push_back(make_route(from, to, rank));
    }
    return routes;
}

Layout make(LayoutKind kind, LayoutCut cut, int num_ranks, const Lengths& documents) {
    return Layout::make(
        {.kind = kind, .cut = cut, .num_ranks = num_ranks, .document_lengths = documents});
}

// Calls visit(from, to) for ordered pairs of layouts of the same documents: all pairs for short
// lists, a few of each layout, taken at random, for each of the thousands of generated lists.
void for_each_pair(const std::function<void(const Layout&, const Layout&)>& visit) {
    std::mt19937 random(4);
    testing::for_each_document_list({0, 1, 2, 5}, 2, [&](const Lengths& documents) {
        for (int num_ranks = 1; num_ranks <= 5; ++num_ranks) {
            const std::vector<Layout> layouts = testing::all_layouts(documents, num_ranks, random);
            for (const Layout& from : layouts) {
                for (const Layout& to : layouts) {
                    visit(from, to);
                }
            }
        }
    });
    for (const int num_ranks : kRankCounts) {
        for (const Lengths& documents :
             testing::generated_document_lists(kListsPerRankCount, num_ranks, random)) {
            const std::vector<Layout> layouts = testing::all_layouts(documents, num_ranks, random);
            for (const Layout& from : layouts) {
                for (std::size_t i = 0; i < kPartnersPerLayout; ++i) {
                    visit(from, layouts[random() % layouts.size()]);
                }
            }
        }
    }
}

const RowMessage* message_of(const std::vector<RowMessage>& messages, int peer) {
    const auto found = std::ranges::find(messages, peer, &RowMessage::peer);
    return found == messages.end() ? nullptr : &*found;
}

std::int64_t num_rows_of(const std::vector<RowRun>& runs) {
    std::int64_t num_rows = 0;
    for (const RowRun& run : runs) {
        num_rows += run.count;
    }
    return num_rows;
}

// Copies rows from the sender's tensor to the receiver's and strikes out those that were read.
void move_rows(const std::vector<RowRun>& runs, Lengths& source, Lengths& target) {
    for (const RowRun& run : runs) {
        for (std::int64_t i = 0; i < run.count; ++i) {
            std::int64_t& row = source.at(static_cast<std::size_t>(run.source + i));
            std::int64_t& slot = target.at(static_cast<std::size_t>(run.target + i));
            ASSERT_GE(row, 0) << "read twice";
            ASSERT_LT(slot, 0) << "written twice";
            std::swap(row, slot);
        }
    }
}

// Each rank holds the flat indices of its tokens in the layout `from`; after the exchange those of
// `to`, and every row has been read once.
TEST(Route, IsABijection) {
    std::int64_t num_pairs = 0;
    for_each_pair([&](const Layout& from, const Layout& to) {
        ++num_pairs;
        SCOPED_TRACE("route");
        const std::vector<Route> routes = routes_of_all_ranks(from, to);
        std::vector<Lengths> sources;
        std::vector<Lengths> targets;
        for (int rank = 0; rank < from.num_ranks(); ++rank) {
            const Route& route = routes[static_cast<std::size_t>(rank)];
            sources.push_back(from.flat_indices(rank));
            targets.emplace_back(static_cast<std::size_t>(route.num_target_rows), -1);
            ASSERT_EQ(route.num_source_rows, from.num_local_tokens(rank));
        }
        for (std::size_t rank = 0; rank < routes.size(); ++rank) {
            move_rows(routes[rank].kept, sources[rank], targets[rank]);
            for (const RowMessage& send : routes[rank].sends) {
                const auto peer = static_cast<std::size_t>(send.peer);
                move_rows(send.runs, sources[rank], targets.at(peer));
            }
        }
        for (int rank = 0; rank < from.num_ranks(); ++rank) {
            const auto i = static_cast<std::size_t>(rank);
            ASSERT_EQ(targets[i], to.flat_indices(rank))
                << describe(from) << " to " << describe(to);
            ASSERT_TRUE(std::ranges::all_of(sources[i], [](std::int64_t row) { return row < 0; }));
        }
    });
    EXPECT_EQ(num_pairs, 21 * 5 * 8 * 8 + 10 * kListsPerRankCount * 8 * 3);
}

TEST(Route, BothEndsOfAMessageListTheSameRuns) {
    for_each_pair([](const Layout& from, const Layout& to) {
        const std::vector<Route> routes = routes_of_all_ranks(from, to);
        std::size_t num_sends = 0;
        std::size_t num_receives = 0;
        for (int rank = 0; rank < from.num_ranks(); ++rank) {
            const Route& route = routes[static_cast<std::size_t>(rank)];
            num_sends += route.sends.size();
            num_receives += route.receives.size();
            for (const auto* messages : {&route.sends, &route.receives}) {
                for (std::size_t i = 0; i < messages->size(); ++i) {
                    const RowMessage& message = (*messages)[i];
                    ASSERT_TRUE(i == 0 || (*messages)[i - 1].peer < message.peer);
                    ASSERT_NE(message.peer, rank);
                    ASSERT_GT(message.num_rows, 0);
                    ASSERT_EQ(message.num_rows, num_rows_of(message.runs));
                }
            }
            for (const RowMessage& receive : route.receives) {
                const Route& sender = routes[static_cast<std::size_t>(receive.peer)];
                const RowMessage* send = message_of(sender.sends, rank);
                ASSERT_NE(send, nullptr) << describe(from) << " to " << describe(to);
                ASSERT_EQ(send->runs, receive.runs) << describe(from) << " to " << describe(to);
            }
        }
        ASSERT_EQ(num_sends, num_receives) << describe(from) << " to " << describe(to);
    });
}

std::vector<RowRun> reversed(std::vector<RowRun> runs) {
    for (RowRun& run : runs) {
        std::swap(run.source, run.target);
    }
    return runs;
}

TEST(Route, TheWayBackIsTheInverse) {
    for_each_pair([](const Layout& from, const Layout& to) {
        for (int rank = 0; rank < from.num_ranks(); ++rank) {
            const Route there = make_route(from, to, rank);
            const Route back = make_route(to, from, rank);
            ASSERT_EQ(reversed(there.kept), back.kept);
            ASSERT_EQ(there.num_source_rows, back.num_target_rows);
            ASSERT_EQ(there.max_peers, back.max_peers);
            ASSERT_EQ(there.sends.size(), back.receives.size());
            ASSERT_EQ(there.receives.size(), back.sends.size());
            for (const RowMessage& send : there.sends) {
                const RowMessage* receive = message_of(back.receives, send.peer);
                ASSERT_NE(receive, nullptr);
                ASSERT_EQ(reversed(send.runs), receive->runs)
                    << describe(from) << " to " << describe(to);
            }
        }
    });
}

TEST(Route, MaxPeersIsTheBusiestRanksPartners) {
    for_each_pair([](const Layout& from, const Layout& to) {
        const std::vector<Route> routes = routes_of_all_ranks(from, to);
        std::size_t most = 0;
        for (const Route& route : routes) {
            std::set<int> peers;
            for (const auto* messages : {&route.sends, &route.receives}) {
                for (const RowMessage& message : *messages) {
                    peers.insert(message.peer);
                }
            }
            most = std::max(most, peers.size());
        }
        for (const Route& route : routes) {
            ASSERT_EQ(route.max_peers, static_cast<int>(most))
                << describe(from) << " to " << describe(to);
        }
    });
}

TEST(Route, NothingMovesBetweenEqualLayouts) {
    for_each_pair([](const Layout& from, const Layout& /*to*/) {
        for (int rank = 0; rank < from.num_ranks(); ++rank) {
            const Route route = make_route(from, from, rank);
            ASSERT_TRUE(route.sends.empty() && route.receives.empty());
            ASSERT_EQ(route.max_peers, 0);
            ASSERT_LE(route.kept.size(), 1U);  // one run: all rows where they are
            ASSERT_EQ(num_rows_of(route.kept), from.num_local_tokens(rank));
        }
    });
}

// Whatever the lengths: chunks are the same for every kind, so only whole chunks move.
TEST(Route, ZigzagToFoldedTalksToTheNeighbourAlone) {
    std::mt19937 random(5);
    for (const int num_ranks : kRankCounts) {
        for (const Lengths& documents :
             testing::generated_document_lists(kListsPerRankCount, num_ranks, random)) {
            for (const LayoutCut cut : {LayoutCut::kDocument, LayoutCut::kRow}) {
                const Layout zigzag = make(LayoutKind::kZigzag, cut, num_ranks, documents);
                const Layout folded = make(LayoutKind::kFolded, cut, num_ranks, documents);
                for (int rank = 0; rank < num_ranks; ++rank) {
                    const Route route = make_route(zigzag, folded, rank);
                    const int partner = rank ^ 1;
                    ASSERT_LE(route.max_peers, 1);
                    for (const auto* messages : {&route.sends, &route.receives}) {
                        ASSERT_LE(messages->size(), partner < num_ranks ? 1U : 0U);
                        ASSERT_TRUE(messages->empty() || messages->front().peer == partner)
                            << describe(zigzag) << " rank " << rank;
                    }
                }
            }
        }
    }
}

TEST(Route, ZigzagToFoldedMovesHalfAShardWhen2PDividesEachDocument) {
    for (const int num_ranks : kRankCounts) {
        const std::int64_t unit = std::int64_t{2} * num_ranks;
        for (const Lengths& documents :
             {Lengths{unit}, Lengths{7 * unit}, Lengths{3 * unit, 0, unit, 40 * unit}}) {
            for (const LayoutCut cut : {LayoutCut::kDocument, LayoutCut::kRow}) {
                const Layout zigzag = make(LayoutKind::kZigzag, cut, num_ranks, documents);
                const Layout folded = make(LayoutKind::kFolded, cut, num_ranks, documents);
                for (int rank = 0; rank < num_ranks; ++rank) {
                    const Route route = make_route(zigzag, folded, rank);
                    if (num_ranks % 2 == 1 && rank == num_ranks - 1) {
                        EXPECT_TRUE(route.sends.empty() && route.receives.empty());
                        continue;
                    }
                    ASSERT_EQ(route.sends.size(), 1U);
                    ASSERT_EQ(route.receives.size(), 1U);
                    EXPECT_EQ(route.sends[0].peer, rank ^ 1);
                    EXPECT_EQ(route.receives[0].peer, rank ^ 1);
                    EXPECT_EQ(2 * route.sends[0].num_rows, zigzag.num_local_tokens(rank));
                    EXPECT_EQ(2 * route.receives[0].num_rows, zigzag.num_local_tokens(rank));
                }
            }
        }
    }
}

TEST(Route, ZigzagToContiguousTakesTwoMessagesAtMost) {
    std::mt19937 random(6);
    for (const int num_ranks : kRankCounts) {
        for (const Lengths& documents :
             testing::generated_document_lists(kListsPerRankCount, num_ranks, random)) {
            for (const LayoutCut cut : {LayoutCut::kDocument, LayoutCut::kRow}) {
                const Layout zigzag = make(LayoutKind::kZigzag, cut, num_ranks, documents);
                const Layout contiguous = make(LayoutKind::kContiguous, cut, num_ranks, documents);
                for (int rank = 0; rank < num_ranks; ++rank) {
                    const Route route = make_route(zigzag, contiguous, rank);
                    ASSERT_LE(route.sends.size(), 2U) << describe(zigzag);
                    ASSERT_LE(route.receives.size(), 2U) << describe(zigzag);
                    for (const RowMessage& send : route.sends) {
                        const int front = rank / 2;
                        const int back = (2 * num_ranks - 1 - rank) / 2;
                        ASSERT_TRUE(send.peer == front || send.peer == back) << describe(zigzag);
                    }
                }
            }
        }
    }
}

TEST(Route, ContiguousToFoldedMovesWholeShards) {
    for (const int num_ranks : kRankCounts) {
        const Lengths documents{std::int64_t{10} * num_ranks, std::int64_t{4} * num_ranks};
        const Layout contiguous =
            make(LayoutKind::kContiguous, LayoutCut::kDocument, num_ranks, documents);
        const Layout folded = make(LayoutKind::kFolded, LayoutCut::kDocument, num_ranks, documents);
        for (int rank = 0; rank < num_ranks; ++rank) {
            const Route route = make_route(contiguous, folded, rank);
            const std::int64_t moved = route.sends.empty() ? 0 : route.sends[0].num_rows;
            ASSERT_LE(route.sends.size(), 1U);
            EXPECT_TRUE(moved == 0 || moved == 14);
            EXPECT_EQ(num_rows_of(route.kept), 14 - moved);
        }
    }
}

TEST(Route, RefusesLayoutsOfDifferentBatches) {
    const auto layout = [](int num_ranks, const Lengths& documents) {
        return make(LayoutKind::kZigzag, LayoutCut::kDocument, num_ranks, documents);
    };
    EXPECT_THROW((void)make_route(layout(2, {8}), layout(3, {8}), 0), UsageError);
    EXPECT_THROW((void)make_route(layout(2, {8}), layout(2, {4, 4}), 0), UsageError);
    EXPECT_THROW((void)make_route(layout(2, {8}), layout(2, {8}), 2), UsageError);
}

}  // namespace
}  // namespace hybridcp
