// Walking the chains of a layout with each segment's place in its rank's local order.
#pragma once

#include <cstdint>
#include <vector>

#include "hybridcp/layout.h"

namespace hybridcp {

/// A segment and where it stands in Layout::segments(segment.rank).
struct IndexedSegment {
    Segment segment;
    std::int64_t index = 0;
};

/// Calls visit(chain) for each document. Local order is by document, then causal, so visiting in
/// this order meets every rank's segments in its local order: both ends of a message list their
/// rows alike.
template <typename Visit>
void for_each_chain(const Layout& layout, Visit visit) {
    std::vector<std::int64_t> next_index(static_cast<std::size_t>(layout.num_ranks()), 0);
    std::vector<IndexedSegment> chain;
    for (std::int64_t doc = 0; doc < layout.num_documents(); ++doc) {
        chain.clear();
        for (const Segment& segment : layout.chain(doc)) {
            chain.push_back({segment, next_index[static_cast<std::size_t>(segment.rank)]++});
        }
        visit(chain);
    }
}

}  // namespace hybridcp
