// Generated lists of document lengths.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace hybridcp::testing {

using Lengths = std::vector<std::int64_t>;

/// `count` lists of the sorts that training meets, with those that are hard to cut for `num_ranks`:
/// long documents, documents that 2P divides, almost divides, many of a few tokens, and two lengths
/// that take turns.
inline std::vector<Lengths> generated_document_lists(int count,
                                                     int num_ranks,
                                                     std::mt19937& random) {
    const auto below = [&](std::int64_t bound) {
        return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bound));
    };
    const std::int64_t num_chunks = std::int64_t{2} * num_ranks;
    const auto document = [&](int sort, std::int64_t index) -> std::int64_t {
        switch (sort) {
            case 0:
                return below(3000);
            case 1:
                return num_chunks * below(20);
            case 2:
                return std::max<std::int64_t>(0, num_chunks * below(20) + below(3) - 1);
            case 3:
                return below(4);
            case 4:
                return index % 2 == 0 ? 1 : num_chunks - 1;
            default:
                return below(3) == 0 ? below(500) : below(20);
        }
    };
    std::vector<Lengths> lists;
    for (int i = 0; i < count; ++i) {
        const int sort = i % 6;
        const std::int64_t num_documents = below(sort == 3 || sort == 4 ? 200 : 6);
        Lengths& list = lists.emplace_back();
        for (std::int64_t index = 0; index < num_documents; ++index) {
            list.push_back(document(sort, index));
        }
    }
    return lists;
}

}  // namespace hybridcp::testing
