// The log-depth exchange of summaries: who sends which window of its document's chain to whom,
// round by round. In round k the element at place i of a chain passes the window of its last 2^k
// elements, itself included, to the element at i + 2^k; after ceil(log2 n) rounds each element
// holds the window of all elements before it. Source: Hillis and Steele, Data parallel algorithms
// (1986), in its exclusive form.
#pragma once

#include <cstdint>
#include <vector>

#include "hybridcp/layout.h"

namespace hybridcp {

struct ScanSchedule {
    /// The window that a segment passes on or gets.
    struct Window {
        std::int64_t segment = 0;  // local: the sender's or the receiver's
        std::int64_t length = 0;   // elements of the chain
        bool from_start = false;   // reaches the start of the chain, so that what lies before it
                                   // does not matter
    };
    struct Message {
        int peer = 0;
        std::vector<Window> windows;  // both ends list them alike
    };
    struct Link {  // within this rank
        Window from, to;
    };
    struct Round {
        std::vector<Message> sends;     // at most one per peer, by ascending peer
        std::vector<Message> receives;  // likewise
        std::vector<Link> local;
    };
    std::vector<Round> rounds;
};

/// With `reverse` chains are walked from their ends. All indices of segments are positions in
/// Layout::segments(rank).
[[nodiscard]] ScanSchedule make_scan_schedule(const Layout& layout, int rank, bool reverse);

}  // namespace hybridcp
