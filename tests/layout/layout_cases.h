// Layouts to test with: every kind and cut, given shards, and documents cut anywhere; of every list
// of up to three short documents, and of generated lists of all sorts.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "hybridcp/layout.h"
#include "layout/document_lists.h"

namespace hybridcp::testing {

inline constexpr std::array kKinds{LayoutKind::kContiguous, LayoutKind::kZigzag,
                                   LayoutKind::kFolded};
/// One to nine ranks, and sixteen.
inline constexpr std::array kRankCounts{1, 2, 3, 4, 5, 6, 7, 8, 9, 16};

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

/// Every kind with either cut, shards of any sizes, and pieces anywhere.
inline std::vector<Layout> all_layouts(const Lengths& documents,
                                       int num_ranks,
                                       std::mt19937& random) {
    std::vector<Layout> layouts;
    for (const LayoutKind kind : kKinds) {
        for (const LayoutCut cut : {LayoutCut::kDocument, LayoutCut::kRow}) {
            layouts.push_back(Layout::make(
                {.kind = kind, .cut = cut, .num_ranks = num_ranks, .document_lengths = documents}));
        }
    }
    const std::int64_t total = std::accumulate(documents.begin(), documents.end(), std::int64_t{0});
    layouts.push_back(Layout::make({.cut = LayoutCut::kRow,
                                    .num_ranks = num_ranks,
                                    .document_lengths = documents,
                                    .shard_lengths = random_shards(total, num_ranks, random)}));
    layouts.push_back(random_layout(documents, num_ranks, random));
    return layouts;
}

/// Calls visit(layout) for all layouts of every list of up to three documents of 0 to 6 tokens, P
/// from 1 to 5; sixteen thousand layouts.
inline void for_each_small_layout(const std::function<void(const Layout&)>& visit) {
    std::mt19937 random(1);
    for_each_document_list({0, 1, 2, 3, 4, 5, 6}, 3, [&](const Lengths& documents) {
        for (int num_ranks = 1; num_ranks <= 5; ++num_ranks) {
            for (const Layout& layout : all_layouts(documents, num_ranks, random)) {
                visit(layout);
            }
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
