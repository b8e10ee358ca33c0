#include "layout/exchange.h"

#include <algorithm>
#include <map>
#include <utility>

#include "hybridcp/error.h"
#include "layout/chains.h"

namespace hybridcp {

namespace {

template <typename Key, typename Message>
std::vector<Message> values_in_order(std::map<Key, Message> messages) {
    std::vector<Message> values;
    values.reserve(messages.size());
    for (auto& [key, message] : messages) {
        values.push_back(std::move(message));
    }
    return values;
}

}  // namespace

HaloExchange make_halo_exchange(const Layout& layout, int rank, int width) {
    HCP_CHECK_GE(width, 1, "halo exchange: the width of the window must be positive");
    HaloExchange exchange;
    exchange.width = width;
    exchange.num_segments = static_cast<std::int64_t>(layout.segments(rank).size());
    RowMessages sends;
    RowMessages receives;
    const std::int64_t halo_rows = width - 1;
    for_each_chain(layout, [&](const std::vector<IndexedSegment>& chain) {
        for (const auto& [receiver, index] : chain) {
            const std::int64_t first = std::max(receiver.begin - halo_rows, std::int64_t{0});
            for (const auto& [sender, sender_index] : chain) {
                const std::int64_t begin = std::max(first, sender.begin);
                const std::int64_t end = std::min(receiver.begin, sender.end);
                if (begin >= end || (sender.rank != rank && receiver.rank != rank)) {
                    continue;
                }
                const RowRun rows{.source = sender.local_begin + (begin - sender.begin),
                                  .target = (index + 1) * halo_rows - (receiver.begin - begin),
                                  .count = end - begin};
                if (sender.rank == receiver.rank) {
                    exchange.local.push_back(rows);
                } else if (sender.rank == rank) {
                    sends.append(receiver.rank, rows);
                } else {
                    receives.append(sender.rank, rows);
                }
            }
        }
    });
    exchange.sends = sends.take();
    exchange.receives = receives.take();
    return exchange;
}

StateExchange make_state_exchange(const Layout& layout, int rank) {
    using Key = std::pair<std::int64_t, int>;  // chain_pos of the sender, peer
    StateExchange exchange;
    std::map<Key, StateMessage> sends;
    std::map<Key, StateMessage> receives;
    const auto append = [](std::map<Key, StateMessage>& messages, const Key& key,
                           std::int64_t segment) {
        StateMessage& message = messages[key];
        message.chain_pos = key.first;
        message.peer = key.second;
        message.segments.push_back(segment);
    };
    for_each_chain(layout, [&](const std::vector<IndexedSegment>& chain) {
        exchange.max_chain_length =
            std::max(exchange.max_chain_length, static_cast<std::int64_t>(chain.size()));
        for (std::size_t i = 0; i < chain.size(); ++i) {
            const auto& [segment, index] = chain[i];
            if (segment.rank != rank) {
                continue;
            }
            exchange.chain_pos.push_back(segment.chain_pos);
            exchange.local_predecessor.push_back(-1);
            exchange.has_predecessor.push_back(i > 0);
            exchange.has_successor.push_back(i + 1 < chain.size());
            if (i > 0 && chain[i - 1].segment.rank == rank) {
                exchange.local_predecessor.back() = chain[i - 1].index;
            } else if (i > 0) {
                append(receives, {segment.chain_pos - 1, chain[i - 1].segment.rank}, index);
            }
            if (i + 1 < chain.size() && chain[i + 1].segment.rank != rank) {
                append(sends, {segment.chain_pos, chain[i + 1].segment.rank}, index);
            }
        }
    });
    exchange.sends = values_in_order(std::move(sends));
    exchange.receives = values_in_order(std::move(receives));
    return exchange;
}

SummaryGather make_summary_gather(const Layout& layout, int rank, bool reverse) {
    const std::size_t num_segments = layout.segments(rank).size();
    SummaryGather gather;
    gather.predecessors.resize(num_segments);
    gather.successors.resize(num_segments);
    std::vector<std::int64_t> num_slots(static_cast<std::size_t>(layout.num_ranks()), 0);
    for_each_chain(layout, [&](const std::vector<IndexedSegment>& chain) {
        if (chain.empty()) {
            return;
        }
        // Participants are chain[offset ...]: all but the last, or (reverse) all but the first.
        const std::size_t offset = reverse ? 1 : 0;
        std::vector<SummaryGather::Slot> slots;
        for (std::size_t i = 0; i + 1 < chain.size(); ++i) {
            const auto& [segment, index] = chain[i + offset];
            slots.push_back({segment.rank, num_slots[static_cast<std::size_t>(segment.rank)]++});
            if (segment.rank == rank) {
                gather.local_segments.push_back(index);
            }
        }
        for (std::size_t i = 0; i < chain.size(); ++i) {
            if (chain[i].segment.rank != rank) {
                continue;
            }
            const auto index = static_cast<std::size_t>(chain[i].index);
            const auto split = slots.cbegin() + static_cast<std::ptrdiff_t>(i);
            if (reverse) {
                gather.successors[index].assign(split, slots.cend());
            } else {
                gather.predecessors[index].assign(slots.cbegin(), split);
                gather.successors[index].assign(split == slots.cend() ? split : split + 1,
                                                slots.cend());
            }
        }
    });
    gather.slots_per_rank = *std::max_element(num_slots.begin(), num_slots.end());
    gather.slots_of_rank = std::move(num_slots);
    return gather;
}

std::vector<std::int64_t> rank_major_to_flat(const Layout& layout) {
    std::vector<std::int64_t> permutation(static_cast<std::size_t>(layout.num_tokens()));
    bool identity = true;
    std::int64_t gathered = 0;
    for (int rank = 0; rank < layout.num_ranks(); ++rank) {
        for (const std::int64_t flat : layout.flat_indices(rank)) {
            identity = identity && flat == gathered;
            permutation[static_cast<std::size_t>(flat)] = gathered++;
        }
    }
    return identity ? std::vector<std::int64_t>{} : permutation;
}

}  // namespace hybridcp
