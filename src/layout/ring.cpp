#include "layout/ring.h"

#include <algorithm>
#include <set>
#include <span>

#include "hybridcp/error.h"

namespace hybridcp {

namespace {

/// How many hops down from their rank each segment goes, in the order of Layout::segments(rank).
using Reach = std::vector<std::vector<int>>;

// Going down from `rank`, the last of `ranks` is the next one above it, or the lowest of all.
int furthest_down(const std::set<int>& ranks, int rank, int num_ranks) {
    const auto above = ranks.upper_bound(rank);
    const int last = above != ranks.end() ? *above : *ranks.begin();
    return (rank - last + num_ranks) % num_ranks;
}

Reach reach_of_segments(const Layout& layout) {
    Reach reach(static_cast<std::size_t>(layout.num_ranks()));
    std::vector<int> chain_reach;
    for (std::int64_t doc = 0; doc < layout.num_documents(); ++doc) {
        const std::span<const Segment> chain = layout.chain(doc);
        chain_reach.assign(chain.size(), 0);
        std::set<int> ranks;  // that hold this segment or a later one: their queries see its keys
        for (std::size_t i = chain.size(); i-- > 0;) {
            ranks.insert(chain[i].rank);
            chain_reach[i] = furthest_down(ranks, chain[i].rank, layout.num_ranks());
        }
        for (std::size_t i = 0; i < chain.size(); ++i) {  // local order is causal in a document
            reach[static_cast<std::size_t>(chain[i].rank)].push_back(chain_reach[i]);
        }
    }
    return reach;
}

/// A segment of keys and its first row in the buffer of the rank that holds it.
struct HeldSegment {
    Segment segment;
    std::int64_t row = 0;
};

/// What of `origin`'s keys is held after so many hops.
std::vector<HeldSegment> held_after(const Layout& layout,
                                    const Reach& reach,
                                    int origin,
                                    int num_hops) {
    std::vector<HeldSegment> held;
    std::int64_t row = 0;
    const std::span<const Segment> segments = layout.segments(origin);
    for (std::size_t i = 0; i < segments.size(); ++i) {
        if (reach[static_cast<std::size_t>(origin)][i] >= num_hops) {
            held.push_back({segments[i], row});
            row += segments[i].size();
        }
    }
    return held;
}

std::int64_t num_rows(const std::vector<HeldSegment>& held) {
    return held.empty() ? 0 : held.back().row + held.back().segment.size();
}

// Neighbouring queries that see the same keys, all of them, make one block.
void append_block(std::vector<RingBlock>& blocks, const RingBlock& block) {
    if (!blocks.empty() && !block.causal && !blocks.back().causal &&
        blocks.back().q_end == block.q_begin && blocks.back().kv_begin == block.kv_begin &&
        blocks.back().kv_end == block.kv_end) {
        blocks.back().q_end = block.q_end;
    } else {
        blocks.push_back(block);
    }
}

/// What a segment of queries sees of a rank's keys are the first of its segments of the document:
/// they stand one after another, so one block serves it.
std::vector<RingBlock> make_blocks(std::span<const Segment> queries,
                                   const std::vector<HeldSegment>& held) {
    std::vector<RingBlock> blocks;
    auto first = held.begin();  // of the document
    for (const Segment& query : queries) {
        while (first != held.end() && first->segment.doc < query.doc) {
            ++first;
        }
        auto end = first;
        while (end != held.end() && end->segment.doc == query.doc &&
               end->segment.begin <= query.begin) {
            ++end;
        }
        if (end == first) {
            continue;
        }
        const HeldSegment& last = *(end - 1);
        append_block(blocks, {.q_begin = query.local_begin,
                              .q_end = query.local_begin + query.size(),
                              .kv_begin = first->row,
                              .kv_end = last.row + last.segment.size(),
                              .causal = last.segment.begin == query.begin});
    }
    return blocks;
}

void append(RowMessage& message, const RowRun& run) {
    append_run(message.runs, run);
    message.num_rows += run.count;
}

/// The rows that blocks use, from where they are held to where they came from.
RowMessage used_rows(const std::vector<RingBlock>& blocks,
                     const std::vector<HeldSegment>& held,
                     int peer) {
    RowMessage message{.peer = peer, .runs = {}, .num_rows = 0};
    auto block = blocks.begin();  // keys ascend, so the first that ends later is the one
    for (const HeldSegment& keys : held) {
        while (block != blocks.end() && block->kv_end <= keys.row) {
            ++block;
        }
        if (block != blocks.end() && block->kv_begin <= keys.row) {
            append(message, {.source = keys.row,
                             .target = keys.segment.local_begin,
                             .count = keys.segment.size()});
        }
    }
    return message;
}

/// The rows that travel one hop further.
RowMessage rows_going_on(const std::vector<HeldSegment>& held,
                         const std::vector<HeldSegment>& held_next,
                         int peer) {
    RowMessage message{.peer = peer, .runs = {}, .num_rows = 0};
    auto next = held_next.begin();
    for (const HeldSegment& keys : held) {
        if (next != held_next.end() && next->segment == keys.segment) {
            append(message,
                   {.source = keys.row, .target = next->row, .count = keys.segment.size()});
            ++next;
        }
    }
    return message;
}

}  // namespace

RingSchedule make_ring_schedule(const Layout& layout, int rank) {
    const int P = layout.num_ranks();
    const std::span<const Segment> local = layout.segments(rank);  // refuses a wrong rank
    const Reach reach = reach_of_segments(layout);
    RingSchedule schedule;
    for (int step = 0; step < P; ++step) {
        const int origin = (rank + step) % P;
        const int reader = (rank - step + P) % P;  // attends this rank's keys in this step
        const std::vector<HeldSegment> held = held_after(layout, reach, origin, step);
        const std::vector<HeldSegment> read = held_after(layout, reach, rank, step);
        RingStep& out = schedule.emplace_back();
        out.origin = origin;
        out.num_rows = num_rows(held);
        out.blocks = make_blocks(local, held);
        out.send =
            rows_going_on(held, held_after(layout, reach, origin, step + 1), (rank - 1 + P) % P);
        out.gradient_send = used_rows(out.blocks, held, origin);
        out.gradient_receive = used_rows(make_blocks(layout.segments(reader), read), read, reader);
    }
    return schedule;
}

}  // namespace hybridcp
