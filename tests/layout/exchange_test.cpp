#include "layout/exchange.h"

#include <gtest/gtest.h>

#include <map>

#include "hybridcp/error.h"
#include "layout/layout_cases.h"

namespace hybridcp {
namespace {

using testing::describe;
using testing::Lengths;

template <typename Make>
auto for_all_ranks(const Layout& layout, Make make) {
    std::vector<decltype(make(0))> all;
    all.reserve(static_cast<std::size_t>(layout.num_ranks()));
    for (int rank = 0; rank < layout.num_ranks(); ++rank) {
        all.push_back(make(rank));
    }
    return all;
}

const RowMessage* message_of(const std::vector<RowMessage>& messages, int peer) {
    for (const RowMessage& message : messages) {
        if (message.peer == peer) {
            return &message;
        }
    }
    return nullptr;
}

// Runs the exchange on flat token indices: what stands in the halo of a rank afterwards, -1 for a
// zero row.
Lengths deliver_halo(const Layout& layout, const std::vector<HaloExchange>& all, int rank) {
    const HaloExchange& own = all[static_cast<std::size_t>(rank)];
    Lengths halo(static_cast<std::size_t>(own.num_segments * (own.width - 1)), -1);
    const auto place = [&](const RowRun& rows, const Lengths& values) {
        EXPECT_EQ(rows.count, static_cast<std::int64_t>(values.size()));
        for (std::size_t i = 0; i < values.size(); ++i) {
            std::int64_t& slot = halo.at(static_cast<std::size_t>(rows.target) + i);
            EXPECT_EQ(slot, -1) << "written twice";
            slot = values[i];
        }
    };
    const auto take = [&](int from, const RowRun& rows) {
        const Lengths flat = layout.flat_indices(from);
        const auto begin = flat.begin() + rows.source;
        return Lengths(begin, begin + rows.count);
    };
    for (const RowRun& rows : own.local) {
        place(rows, take(rank, rows));
    }
    for (const RowMessage& receive : own.receives) {
        // The message as its sender packs it, unpacked as its receiver reads it.
        const auto* send = message_of(all[static_cast<std::size_t>(receive.peer)].sends, rank);
        if (send == nullptr) {
            ADD_FAILURE() << "rank " << receive.peer << " sends nothing to rank " << rank;
            continue;
        }
        EXPECT_EQ(send->num_rows, receive.num_rows);
        Lengths packed;
        for (const RowRun& rows : send->runs) {
            const Lengths values = take(receive.peer, rows);
            packed.insert(packed.end(), values.begin(), values.end());
        }
        EXPECT_EQ(static_cast<std::int64_t>(packed.size()), receive.num_rows);
        auto next = packed.begin();
        for (const RowRun& rows : receive.runs) {
            place(rows, Lengths(next, next + rows.count));
            next += rows.count;
        }
    }
    return halo;
}

TEST(HaloExchange, DeliversThePrecedingTokensOfTheDocument) {
    testing::for_each_small_layout([](const Layout& layout) {
        for (const int width : {1, 2, 4, 8}) {
            const auto all = for_all_ranks(
                layout, [&](int rank) { return make_halo_exchange(layout, rank, width); });
            std::size_t num_sends = 0;
            std::size_t num_receives = 0;
            for (int rank = 0; rank < layout.num_ranks(); ++rank) {
                Lengths expected;
                for (const Segment& segment : layout.segments(rank)) {
                    for (std::int64_t pos = segment.begin - (width - 1); pos < segment.begin;
                         ++pos) {
                        const auto doc = static_cast<std::size_t>(segment.doc);
                        expected.push_back(pos < 0 ? -1 : layout.document_offsets()[doc] + pos);
                    }
                }
                EXPECT_EQ(deliver_halo(layout, all, rank), expected)
                    << describe(layout) << " rank " << rank << " width " << width;
                num_sends += all[static_cast<std::size_t>(rank)].sends.size();
                num_receives += all[static_cast<std::size_t>(rank)].receives.size();
            }
            EXPECT_EQ(num_sends, num_receives) << describe(layout);  // nothing is sent in vain
        }
    });
}

TEST(HaloExchange, OneMessagePerPeerByAscendingPeer) {
    testing::for_each_small_layout([](const Layout& layout) {
        for (int rank = 0; rank < layout.num_ranks(); ++rank) {
            const HaloExchange exchange = make_halo_exchange(layout, rank, 4);
            for (const auto* messages : {&exchange.sends, &exchange.receives}) {
                int previous = -1;
                for (const RowMessage& message : *messages) {
                    EXPECT_GT(message.peer, previous);
                    EXPECT_NE(message.peer, rank);
                    EXPECT_GT(message.num_rows, 0);
                    previous = message.peer;
                }
            }
        }
    });
}

TEST(HaloExchange, ReachesOverSeveralShortShards) {
    // One token per rank: rank 3 needs the tokens of ranks 0, 1 and 2.
    const Layout layout = Layout::make({.num_ranks = 4, .document_lengths = {4}});
    const HaloExchange exchange = make_halo_exchange(layout, 3, 4);
    ASSERT_EQ(exchange.receives.size(), 3U);
    for (int peer = 0; peer < 3; ++peer) {
        EXPECT_EQ(exchange.receives[static_cast<std::size_t>(peer)].peer, peer);
        EXPECT_EQ(exchange.receives[static_cast<std::size_t>(peer)].runs.front().target, peer);
    }
    EXPECT_THROW((void)make_halo_exchange(layout, 3, 0), UsageError);
    EXPECT_THROW((void)make_halo_exchange(layout, 4, 2), UsageError);
}

// Documents of the segments that a message carries, as each side sees them.
Lengths documents_of(const Layout& layout, int rank, const StateMessage& message) {
    Lengths documents;
    for (const std::int64_t index : message.segments) {
        documents.push_back(layout.segments(rank)[static_cast<std::size_t>(index)].doc);
    }
    return documents;
}

TEST(StateExchange, MessagesOfAPairMatchInOrder) {
    testing::for_each_small_layout([](const Layout& layout) {
        const auto all =
            for_all_ranks(layout, [&](int rank) { return make_state_exchange(layout, rank); });
        for (int from = 0; from < layout.num_ranks(); ++from) {
            for (int to = 0; to < layout.num_ranks(); ++to) {
                // The k-th send meets the k-th receive: same link of the chain, same documents in
                // the same order.
                std::vector<std::pair<std::int64_t, Lengths>> sent;
                std::vector<std::pair<std::int64_t, Lengths>> received;
                for (const StateMessage& message : all[static_cast<std::size_t>(from)].sends) {
                    if (message.peer == to) {
                        sent.emplace_back(message.chain_pos, documents_of(layout, from, message));
                    }
                }
                for (const StateMessage& message : all[static_cast<std::size_t>(to)].receives) {
                    if (message.peer == from) {
                        received.emplace_back(message.chain_pos, documents_of(layout, to, message));
                    }
                }
                EXPECT_EQ(sent, received) << describe(layout) << from << " to " << to;
                EXPECT_TRUE(std::is_sorted(sent.begin(), sent.end()));
            }
        }
    });
}

TEST(StateExchange, LinksAreThoseOfTheChains) {
    testing::for_each_small_layout([](const Layout& layout) {
        std::int64_t longest = 0;
        for (std::int64_t doc = 0; doc < layout.num_documents(); ++doc) {
            longest = std::max(longest, static_cast<std::int64_t>(layout.chain(doc).size()));
        }
        for (int rank = 0; rank < layout.num_ranks(); ++rank) {
            const StateExchange exchange = make_state_exchange(layout, rank);
            const auto segments = layout.segments(rank);
            EXPECT_EQ(exchange.max_chain_length, longest);
            ASSERT_EQ(exchange.chain_pos.size(), segments.size());
            ASSERT_EQ(exchange.local_predecessor.size(), segments.size());
            std::map<std::int64_t, std::pair<std::int64_t, int>> from;  // local segment: link, peer
            for (const StateMessage& message : exchange.receives) {
                for (const std::int64_t index : message.segments) {
                    EXPECT_TRUE(
                        from.emplace(index, std::pair{message.chain_pos, message.peer}).second);
                }
            }
            for (std::size_t i = 0; i < segments.size(); ++i) {
                const auto chain = layout.chain(segments[i].doc);
                const auto pos = static_cast<std::size_t>(segments[i].chain_pos);
                EXPECT_EQ(exchange.chain_pos[i], segments[i].chain_pos);
                EXPECT_EQ(exchange.has_predecessor[i], pos > 0);
                EXPECT_EQ(exchange.has_successor[i], pos + 1 < chain.size());
                const std::int64_t local = exchange.local_predecessor[i];
                if (pos > 0 && chain[pos - 1].rank == rank) {
                    ASSERT_GE(local, 0);
                    EXPECT_EQ(segments[static_cast<std::size_t>(local)], chain[pos - 1]);
                } else {
                    EXPECT_EQ(local, -1);
                }
                const bool remote = pos > 0 && chain[pos - 1].rank != rank;
                ASSERT_EQ(from.contains(static_cast<std::int64_t>(i)), remote) << describe(layout);
                if (remote) {
                    EXPECT_EQ(from[static_cast<std::int64_t>(i)],
                              std::pair(segments[i].chain_pos - 1, chain[pos - 1].rank));
                }
            }
        }
    });
}

// Forward, a segment at chain_pos c waits for link c - 1; backward, one at c + 1 for link c + 1.
bool must_wait_first(const std::vector<StateMessage>& waits,
                     const StateMessage& message,
                     bool backward) {
    return std::any_of(waits.begin(), waits.end(), [&](const StateMessage& wait) {
        return backward ? wait.chain_pos > message.chain_pos : wait.chain_pos < message.chain_pos;
    });
}

// Ranks that wait for their messages one after another, in the order of `receives` (or backwards),
// and send what is ready: true when all of them come to an end. A message can leave when the waits
// before its link are over.
bool runs_to_the_end(const std::vector<StateExchange>& all, bool backward) {
    const auto ordered = [&](std::vector<StateMessage> messages) {
        if (backward) {
            std::reverse(messages.begin(), messages.end());
        }
        return messages;
    };
    std::map<std::pair<int, int>, int>
        in_flight;  // messages sent and not yet received, by (from, to)
    std::vector<std::size_t> next_wait(all.size(), 0);
    std::vector<std::size_t> next_send(all.size(), 0);
    for (bool progress = true; progress;) {
        progress = false;
        for (std::size_t rank = 0; rank < all.size(); ++rank) {
            const auto me = static_cast<int>(rank);
            const auto waits = ordered(backward ? all[rank].sends : all[rank].receives);
            const auto sends = ordered(backward ? all[rank].receives : all[rank].sends);
            while (next_send[rank] < sends.size()) {
                const StateMessage& message = sends[next_send[rank]];
                if (must_wait_first(
                        {waits.begin() + static_cast<std::ptrdiff_t>(next_wait[rank]), waits.end()},
                        message, backward)) {
                    break;
                }
                ++in_flight[{me, message.peer}];
                ++next_send[rank];
                progress = true;
            }
            if (next_wait[rank] < waits.size()) {
                int& arrived = in_flight[{waits[next_wait[rank]].peer, me}];
                if (arrived > 0) {
                    --arrived;
                    ++next_wait[rank];
                    progress = true;
                }
            }
        }
    }
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
        const std::size_t num_waits = backward ? all[rank].sends.size() : all[rank].receives.size();
        const std::size_t num_sends = backward ? all[rank].receives.size() : all[rank].sends.size();
        if (next_wait[rank] != num_waits || next_send[rank] != num_sends) {
            return false;
        }
    }
    return true;
}

TEST(StateExchange, WaitsInChainOrderNeverDeadlock) {
    testing::for_each_small_layout([](const Layout& layout) {
        const auto all =
            for_all_ranks(layout, [&](int rank) { return make_state_exchange(layout, rank); });
        EXPECT_TRUE(runs_to_the_end(all, false)) << describe(layout);
        EXPECT_TRUE(runs_to_the_end(all, true)) << describe(layout);
    });
}

TEST(StateExchange, WaitsInAnotherOrderCanDeadlock) {
    // Why the order matters: two documents that cross, waited for in the wrong order, block each
    // other.
    const Layout layout = Layout::from_chains({.num_ranks = 2, .document_lengths = {3, 3}},
                                              {{{.begin = 0, .end = 1, .rank = 0},
                                                {.begin = 1, .end = 2, .rank = 1},
                                                {.begin = 2, .end = 3, .rank = 0}},
                                               {{.begin = 0, .end = 1, .rank = 1},
                                                {.begin = 1, .end = 2, .rank = 0},
                                                {.begin = 2, .end = 3, .rank = 1}}});
    auto all = for_all_ranks(layout, [&](int rank) { return make_state_exchange(layout, rank); });
    EXPECT_TRUE(runs_to_the_end(all, false));
    for (StateExchange& exchange : all) {
        std::reverse(exchange.receives.begin(), exchange.receives.end());
        std::reverse(exchange.sends.begin(), exchange.sends.end());
    }
    EXPECT_FALSE(runs_to_the_end(all, false));
}

TEST(SummaryGather, SlotsNameTheSameSegmentsOnEveryRank) {
    testing::for_each_small_layout([](const Layout& layout) {
        for (const bool reverse : {false, true}) {
            const auto all = for_all_ranks(
                layout, [&](int rank) { return make_summary_gather(layout, rank, reverse); });
            std::int64_t fullest = 0;
            for (int rank = 0; rank < layout.num_ranks(); ++rank) {
                const SummaryGather& own = all[static_cast<std::size_t>(rank)];
                EXPECT_EQ(own.slots_per_rank, all[0].slots_per_rank);
                fullest = std::max(fullest, static_cast<std::int64_t>(own.local_segments.size()));
                const auto segments = layout.segments(rank);
                ASSERT_EQ(own.predecessors.size(), segments.size());
                ASSERT_EQ(own.successors.size(), segments.size());
                for (std::size_t i = 0; i < segments.size(); ++i) {
                    const auto named = [&](const std::vector<SummaryGather::Slot>& slots) {
                        std::vector<Segment> segments_named;
                        for (const SummaryGather::Slot& slot : slots) {
                            const auto& filled =
                                all.at(static_cast<std::size_t>(slot.rank)).local_segments;
                            segments_named.push_back(
                                layout.segments(slot.rank)[static_cast<std::size_t>(
                                    filled.at(static_cast<std::size_t>(slot.slot)))]);
                        }
                        return segments_named;
                    };
                    const auto chain = layout.chain(segments[i].doc);
                    const auto self = chain.begin() + segments[i].chain_pos;
                    const std::vector<Segment> before(chain.begin(), self);
                    std::vector<Segment> after(self + 1, chain.end());
                    if (!reverse && !after.empty()) {
                        after.pop_back();  // the last of the chain takes no part
                    }
                    EXPECT_EQ(named(own.predecessors[i]), reverse ? std::vector<Segment>{} : before)
                        << describe(layout) << " rank " << rank;
                    EXPECT_EQ(named(own.successors[i]), after)
                        << describe(layout) << " rank " << rank;
                }
            }
            EXPECT_EQ(fullest, all[0].slots_per_rank);
        }
    });
}

TEST(SummaryGather, WholeDocumentsTakeNoPart) {
    const Layout layout = Layout::make({.num_ranks = 4, .document_lengths = {1, 8, 1, 0}});
    for (int rank = 0; rank < 4; ++rank) {
        const SummaryGather gather = make_summary_gather(layout, rank, false);
        EXPECT_EQ(gather.slots_per_rank, 1);
        EXPECT_EQ(gather.local_segments.size(), rank < 3 ? 1U : 0U);
    }
    const Layout single = Layout::make({.num_ranks = 3, .document_lengths = {1, 1}});
    EXPECT_EQ(make_summary_gather(single, 0, true).slots_per_rank, 0);
}

TEST(RankMajorToFlat, IsTheBijectionThatPutsTokensBack) {
    testing::for_each_small_layout([](const Layout& layout) {
        Lengths gathered;  // flat indices, one rank after another
        for (int rank = 0; rank < layout.num_ranks(); ++rank) {
            const Lengths flat = layout.flat_indices(rank);
            gathered.insert(gathered.end(), flat.begin(), flat.end());
        }
        Lengths identity(gathered.size());
        for (std::size_t i = 0; i < identity.size(); ++i) {
            identity[i] = static_cast<std::int64_t>(i);
        }
        const Lengths permutation = rank_major_to_flat(layout);
        if (permutation.empty()) {
            EXPECT_EQ(gathered, identity) << describe(layout);
            return;
        }
        EXPECT_NE(permutation, identity) << "an identity should be empty: " << describe(layout);
        Lengths flat;
        for (const std::int64_t source : permutation) {
            flat.push_back(gathered.at(static_cast<std::size_t>(source)));
        }
        EXPECT_EQ(flat, identity) << describe(layout);
    });
}

}  // namespace
}  // namespace hybridcp
