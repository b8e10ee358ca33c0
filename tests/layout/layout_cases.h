// Every small layout: all lists of up to three documents of a few lengths, all rank counts, both
// cuts, uneven and empty shards, and hand-made layouts with several segments of a document per
// rank.
#pragma once

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "hybridcp/layout.h"

namespace hybridcp::testing {

using Lengths = std::vector<std::int64_t>;

/// Calls visit for each list of at most `max_documents` lengths taken from `lengths`, the empty
/// list included.
inline void for_each_document_list(const Lengths& lengths,
                                   std::size_t max_documents,
                                   const std::function<void(const Lengths&)>& visit) {
    Lengths list;
    const std::function<void()> extend = [&] {
        visit(list);
        if (list.size() == max_documents) {
            return;
        }
        for (const std::int64_t length : lengths) {
            list.push_back(length);
            extend();
            list.pop_back();
        }
    };
    extend();
}

/// Zigzag by hand: each document in 2P pieces, of which rank r holds r and 2P-1-r.
inline Layout zigzag_layout(const Lengths& documents, int num_ranks) {
    const int num_pieces = 2 * num_ranks;
    std::vector<std::vector<Segment>> chains;
    for (const std::int64_t length : documents) {
        std::vector<Segment>& chain = chains.emplace_back();
        for (int piece = 0; piece < num_pieces; ++piece) {
            chain.push_back({.begin = length * piece / num_pieces,
                             .end = length * (piece + 1) / num_pieces,
                             .rank = std::min(piece, num_pieces - 1 - piece)});
        }
    }
    return Layout::from_chains(
        {.kind = LayoutKind::kZigzag, .num_ranks = num_ranks, .document_lengths = documents},
        chains);
}

/// Any layout at all: documents cut anywhere, pieces on any rank.
inline Layout random_layout(const Lengths& documents, int num_ranks, std::mt19937& random) {
    std::vector<std::vector<Segment>> chains;
    for (const std::int64_t length : documents) {
        std::vector<Segment>& chain = chains.emplace_back();
        for (std::int64_t begin = 0; begin < length;) {
            const std::int64_t end =
                begin + 1 + static_cast<std::int64_t>(random()) % (length - begin);
            chain.push_back(
                {.begin = begin,
                 .end = end,
                 .rank = static_cast<int>(random() % static_cast<unsigned>(num_ranks))});
            begin = end;
        }
    }
    return Layout::from_chains({.num_ranks = num_ranks, .document_lengths = documents}, chains);
}

/// Shards of any sizes, empty ones included, that add up to `total`.
inline Lengths random_shards(std::int64_t total, int num_ranks, std::mt19937& random) {
    Lengths cuts{0, total};
    for (int i = 1; i < num_ranks; ++i) {
        cuts.push_back(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(total + 1)));
    }
    std::sort(cuts.begin(), cuts.end());
    Lengths shards;
    for (std::size_t i = 1; i < cuts.size(); ++i) {
        shards.push_back(cuts[i] - cuts[i - 1]);
    }
    return shards;
}

/// Calls visit(layout) for all of the above, P from 1 to 5; ten thousand layouts.
inline void for_each_small_layout(const std::function<void(const Layout&)>& visit) {
    std::mt19937 random(1);
    for_each_document_list({0, 1, 2, 3, 4, 5, 6}, 3, [&](const Lengths& documents) {
        std::int64_t total = 0;
        for (const std::int64_t length : documents) {
            total += length;
        }
        for (int num_ranks = 1; num_ranks <= 5; ++num_ranks) {
            LayoutOptions options{.num_ranks = num_ranks, .document_lengths = documents};
            visit(Layout::make(options));
            options.cut = LayoutCut::kRow;
            visit(Layout::make(options));
            options.shard_lengths = random_shards(total, num_ranks, random);
            visit(Layout::make(options));
            visit(zigzag_layout(documents, num_ranks));
            visit(random_layout(documents, num_ranks, random));
        }
    });
}

inline std::string describe(const Layout& layout) {
    std::string text = "P=" + std::to_string(layout.num_ranks()) + ":";
    for (std::int64_t doc = 0; doc < layout.num_documents(); ++doc) {
        text += " |";
        for (const Segment& segment : layout.chain(doc)) {
            text += " [" + std::to_string(segment.begin) + "," + std::to_string(segment.end) +
                    ")@" + std::to_string(segment.rank);
        }
    }
    return text;
}

}  // namespace hybridcp::testing
