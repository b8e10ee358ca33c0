#include "layout/scan.h"

#include <algorithm>
#include <map>

#include "layout/chains.h"

namespace hybridcp {

namespace {

using Messages = std::map<int, ScanSchedule::Message>;

struct RoundBuilder {
    Messages sends, receives;
    std::vector<ScanSchedule::Link> local;
};

void append(Messages& messages, int peer, const ScanSchedule::Window& window) {
    messages[peer].peer = peer;
    messages[peer].windows.push_back(window);
}

std::vector<ScanSchedule::Message> by_peer(const Messages& messages) {
    std::vector<ScanSchedule::Message> result;
    for (const auto& [peer, message] : messages) {
        result.push_back(message);
    }
    return result;
}

void add_chain(std::vector<RoundBuilder>& rounds,
               const std::vector<IndexedSegment>& chain,
               int rank) {
    std::size_t round = 0;
    for (std::size_t distance = 1; distance < chain.size(); distance *= 2, ++round) {
        if (rounds.size() <= round) {
            rounds.emplace_back();
        }
        for (std::size_t i = 0; i + distance < chain.size(); ++i) {
            const IndexedSegment& sender = chain[i];
            const IndexedSegment& receiver = chain[i + distance];
            const auto length = static_cast<std::int64_t>(std::min(distance, i + 1));
            const bool from_start = i + 1 <= distance;
            const ScanSchedule::Window from{sender.index, length, from_start};
            const ScanSchedule::Window to{receiver.index, length, from_start};
            if (sender.segment.rank == rank && receiver.segment.rank == rank) {
                rounds[round].local.push_back({from, to});
            } else if (sender.segment.rank == rank) {
                append(rounds[round].sends, receiver.segment.rank, from);
            } else if (receiver.segment.rank == rank) {
                append(rounds[round].receives, sender.segment.rank, to);
            }
        }
    }
}

}  // namespace

ScanSchedule make_scan_schedule(const Layout& layout, int rank, bool reverse) {
    std::vector<RoundBuilder> rounds;
    for_each_chain(layout, [&](std::vector<IndexedSegment> chain) {
        if (reverse) {
            std::reverse(chain.begin(), chain.end());
        }
        add_chain(rounds, chain, rank);
    });
    ScanSchedule schedule;
    for (RoundBuilder& round : rounds) {
        schedule.rounds.push_back(
            {by_peer(round.sends), by_peer(round.receives), std::move(round.local)});
    }
    return schedule;
}

}  // namespace hybridcp
