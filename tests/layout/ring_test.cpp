#include "layout/ring.h"

#include <gtest/gtest.h>

#include <set>

#include "hybridcp/error.h"
#include "layout/layout_cases.h"

namespace hybridcp {
namespace {

using testing::describe;
using testing::Lengths;

std::vector<RingSchedule> schedules_of(const Layout& layout) {
    std::vector<RingSchedule> all;
    all.reserve(static_cast<std::size_t>(layout.num_ranks()));
    for (int rank = 0; rank < layout.num_ranks(); ++rank) {
        all.push_back(make_ring_schedule(layout, rank));
    }
    return all;
}

std::int64_t num_pairs(const RingBlock& block) {
    const std::int64_t queries = block.q_end - block.q_begin;
    const std::int64_t all = queries * (block.kv_end - block.kv_begin);
    return block.causal ? all - queries * (queries - 1) / 2 : all;
}

std::int64_t num_pairs(const RingStep& step) {
    std::int64_t pairs = 0;
    for (const RingBlock& block : step.blocks) {
        pairs += num_pairs(block);
    }
    return pairs;
}

/// Carries flat token indices round the ring and meets every query with every key.
class Simulation {
  public:
    explicit Simulation(const Layout& layout)
        : layout_(layout), schedules_(schedules_of(layout)), doc_of_(num_tokens()) {
        for (std::int64_t doc = 0; doc < layout.num_documents(); ++doc) {
            const Lengths& offsets = layout.document_offsets();
            const auto i = static_cast<std::size_t>(doc);
            std::fill(doc_of_.begin() + offsets[i], doc_of_.begin() + offsets[i + 1], doc);
        }
        for (int rank = 0; rank < layout.num_ranks(); ++rank) {
            local_.push_back(layout.flat_indices(rank));
        }
    }

    void run() {
        std::vector<Lengths> held = local_;
        std::set<std::pair<std::int64_t, std::int64_t>> met;
        for (int step = 0; step < layout_.num_ranks(); ++step) {
            std::vector<Lengths> next(held.size());
            for (int rank = 0; rank < layout_.num_ranks(); ++rank) {
                const Lengths& keys = held[index(rank)];
                check_step(rank, step, keys);
                meet(at(rank, step), local_[index(rank)], keys, met);
                const RowMessage& send = at(rank, step).send;
                EXPECT_EQ(send.peer, (rank + layout_.num_ranks() - 1) % layout_.num_ranks());
                next[index(send.peer)] = packed(send, keys);
            }
            held = next;
        }
        for (const Lengths& left : held) {
            EXPECT_TRUE(left.empty()) << "sent in vain";
        }
        EXPECT_EQ(static_cast<std::int64_t>(met.size()), num_visible_pairs());
    }

  private:
    static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
    [[nodiscard]] std::size_t num_tokens() const {
        return static_cast<std::size_t>(layout_.num_tokens());
    }
    [[nodiscard]] const RingStep& at(int rank, int step) const {
        return schedules_[index(rank)][index(step)];
    }

    [[nodiscard]] std::int64_t num_visible_pairs() const {
        std::int64_t pairs = 0;
        for (const std::int64_t length : layout_.document_lengths()) {
            pairs += length * (length + 1) / 2;
        }
        return pairs;
    }

    // The message's rows in the order in which the receiver holds them.
    [[nodiscard]] Lengths packed(const RowMessage& message, const Lengths& keys) const {
        Lengths rows;
        for (const RowRun& run : message.runs) {
            EXPECT_EQ(run.target, static_cast<std::int64_t>(rows.size()));
            EXPECT_LE(run.source + run.count, static_cast<std::int64_t>(keys.size()));
            rows.insert(rows.end(), keys.begin() + run.source,
                        keys.begin() + run.source + run.count);
        }
        EXPECT_EQ(message.num_rows, static_cast<std::int64_t>(rows.size()));
        return rows;
    }

    // The step holds what arrived, and gives back the gradients of exactly the rows that it uses.
    void check_step(int rank, int step, const Lengths& keys) const {
        const RingStep& here = at(rank, step);
        EXPECT_EQ(here.origin, (rank + step) % layout_.num_ranks());
        EXPECT_EQ(here.num_rows, static_cast<std::int64_t>(keys.size()));
        std::set<std::int64_t> used;
        for (const RingBlock& block : here.blocks) {
            for (std::int64_t row = block.kv_begin; row < block.kv_end; ++row) {
                used.insert(row);
            }
        }
        std::set<std::int64_t> returned;
        for (const RowRun& run : here.gradient_send.runs) {
            for (std::int64_t i = 0; i < run.count; ++i) {
                EXPECT_TRUE(returned.insert(run.source + i).second);
                EXPECT_EQ(keys.at(static_cast<std::size_t>(run.source + i)),
                          local_[index(here.origin)].at(static_cast<std::size_t>(run.target + i)));
            }
        }
        EXPECT_EQ(returned, used);
        EXPECT_EQ(here.gradient_send.num_rows, static_cast<std::int64_t>(used.size()));
        EXPECT_EQ(here.gradient_send.peer, here.origin);
        const RowMessage& receive = at(here.origin, step).gradient_receive;
        EXPECT_EQ(receive.peer, rank);
        EXPECT_EQ(receive.num_rows, here.gradient_send.num_rows);
        EXPECT_EQ(receive.runs, here.gradient_send.runs);
    }

    void meet(const RingStep& step,
              const Lengths& queries,
              const Lengths& keys,
              std::set<std::pair<std::int64_t, std::int64_t>>& met) const {
        std::int64_t next_query = 0;
        std::int64_t last_key = 0;
        for (const RingBlock& block : step.blocks) {
            EXPECT_GE(block.q_begin, next_query);
            EXPECT_LT(block.q_begin, block.q_end);
            EXPECT_LT(block.kv_begin, block.kv_end);
            EXPECT_GE(block.kv_end, last_key);
            next_query = block.q_end;
            last_key = block.kv_end;
            for (std::int64_t row = block.q_begin; row < block.q_end; ++row) {
                const std::int64_t hidden = block.causal ? block.q_end - 1 - row : 0;
                for (std::int64_t column = block.kv_begin; column < block.kv_end - hidden;
                     ++column) {
                    const std::int64_t query = queries.at(static_cast<std::size_t>(row));
                    const std::int64_t key = keys.at(static_cast<std::size_t>(column));
                    EXPECT_EQ(doc_of(query), doc_of(key));
                    EXPECT_LE(key, query);
                    EXPECT_TRUE(met.insert({query, key}).second) << "met twice";
                }
            }
        }
    }

    [[nodiscard]] std::int64_t doc_of(std::int64_t flat) const {
        return doc_of_[static_cast<std::size_t>(flat)];
    }

    const Layout& layout_;
    std::vector<RingSchedule> schedules_;
    Lengths doc_of_;
    std::vector<Lengths> local_;
};

void expect_exact(const Layout& layout) {
    SCOPED_TRACE(describe(layout));
    Simulation(layout).run();
}

TEST(RingSchedule, EveryQueryMeetsEveryKeyThatItSeesOnce) {
    testing::for_each_small_layout(expect_exact);
}

TEST(RingSchedule, PackedBatchesOnManyRanks) {
    std::mt19937 random(5);
    for (int round = 0; round < 2000; ++round) {
        Lengths documents(1 + random() % 6);
        std::int64_t total = 0;
        for (std::int64_t& length : documents) {
            length = static_cast<std::int64_t>(random() % 40);
            total += length;
        }
        LayoutOptions options{.num_ranks = 1 + static_cast<int>(random() % 9),
                              .document_lengths = documents};
        expect_exact(testing::random_layout(documents, options.num_ranks, random));
        for (const LayoutKind kind :
             {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kFolded}) {
            options.kind = kind;
            options.cut = random() % 2 == 0 ? LayoutCut::kDocument : LayoutCut::kRow;
            expect_exact(Layout::make(options));
        }
        options.kind = LayoutKind::kContiguous;
        options.cut = LayoutCut::kRow;
        options.shard_lengths = testing::random_shards(total, options.num_ranks, random);
        expect_exact(Layout::make(options));
    }
}

class EqualZigzag : public ::testing::TestWithParam<int> {
  protected:
    [[nodiscard]] int num_ranks() const { return GetParam(); }
    [[nodiscard]] Layout layout(std::int64_t chunk) const {
        return Layout::make({.kind = LayoutKind::kZigzag,
                             .num_ranks = num_ranks(),
                             .document_lengths = {chunk * 2 * num_ranks()}});
    }
};

TEST_P(EqualZigzag, ThreeQuartersOfTheRowsOfAPlainRingAreSent) {
    const std::int64_t P = num_ranks();
    for (const std::int64_t chunk : {1, 2, 7, 64}) {
        const std::vector<RingSchedule> schedules = schedules_of(layout(chunk));
        std::int64_t sent = 0;
        for (std::int64_t rank = 0; rank < P; ++rank) {
            std::int64_t rank_sent = 0;
            for (const RingStep& step : schedules[static_cast<std::size_t>(rank)]) {
                rank_sent += step.send.num_rows;
                EXPECT_LE(step.send.runs.size(), 1U);  // one piece: nothing is packed
            }
            // All front halves pass, and the back halves of the ranks above that are on their way
            // to rank 0.
            const std::int64_t backs = rank == 0 ? 0 : P - rank;
            EXPECT_EQ(rank_sent, (P - 1 + backs) * chunk);
            sent += rank_sent;
        }
        EXPECT_EQ(4 * sent, 3 * P * (P - 1) * 2 * chunk);
    }
}

TEST_P(EqualZigzag, EveryRankDoesTheSameWorkInEveryStep) {
    for (const std::int64_t chunk : {1, 2, 7, 64}) {
        for (int rank = 0; rank < num_ranks(); ++rank) {
            const RingSchedule schedule = make_ring_schedule(layout(chunk), rank);
            for (std::size_t step = 0; step < schedule.size(); ++step) {
                // The diagonals are in the first step; the last rank's chunks are one segment.
                EXPECT_EQ(num_pairs(schedule[step]), 2 * chunk * chunk + (step == 0 ? chunk : 0));
                EXPECT_EQ(schedule[step].blocks.size(),
                          step == 0 && rank + 1 < num_ranks() ? 2U : 1U);
            }
        }
    }
}

TEST_P(EqualZigzag, GradientsGoBackForTheRowsThatWereUsed) {
    const std::int64_t chunk = 5;
    for (int rank = 0; rank < num_ranks(); ++rank) {
        const RingSchedule schedule = make_ring_schedule(layout(chunk), rank);
        for (const RingStep& step : schedule) {  // from a lower rank the front half only
            EXPECT_EQ(step.gradient_send.num_rows, (step.origin < rank ? 1 : 2) * chunk);
            EXPECT_EQ(step.gradient_receive.num_rows,
                      (rank < step.gradient_receive.peer ? 1 : 2) * chunk);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, EqualZigzag, ::testing::Values(2, 3, 4, 5, 6, 7, 8, 9, 16));

TEST(RingSchedule, ContiguousShardsTravelDownToTheRankAboveTheirOwn) {
    const int P = 4;
    const std::vector<RingSchedule> schedules =
        schedules_of(Layout::make({.num_ranks = P, .document_lengths = {40}}));
    std::int64_t sent = 0;
    for (const RingSchedule& schedule : schedules) {
        for (const RingStep& step : schedule) {
            sent += step.send.num_rows;
        }
    }
    // shard 0 goes round to rank 1 by all others, shard 1 to 2, shard 2 to 3; the last stays
    EXPECT_EQ(sent, 3 * 3 * 10);
}

TEST(RingSchedule, DocumentsOfOneRankStayThere) {
    const Layout layout = Layout::make({.cut = LayoutCut::kRow,
                                        .num_ranks = 3,
                                        .document_lengths = {5, 5, 5},
                                        .shard_lengths = {5, 5, 5}});
    for (const RingSchedule& schedule : schedules_of(layout)) {
        for (std::size_t step = 0; step < schedule.size(); ++step) {
            EXPECT_EQ(schedule[step].send.num_rows, 0);
            EXPECT_EQ(schedule[step].blocks.size(), step == 0 ? 1U : 0U);
            EXPECT_EQ(schedule[step].gradient_send.num_rows, step == 0 ? 5 : 0);
        }
    }
}

TEST(RingSchedule, RefusesARankThatDoesNotExist) {
    const Layout layout = Layout::make({.num_ranks = 2, .document_lengths = {5}});
    EXPECT_THROW((void)make_ring_schedule(layout, 2), UsageError);
    EXPECT_THROW((void)make_ring_schedule(layout, -1), UsageError);
}

}  // namespace
}  // namespace hybridcp
