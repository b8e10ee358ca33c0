// What a rank sends and receives for one layout, computed once per batch from the chains: the halo
// of the causal convolution, the state exchange of linear attention, and the order in which
// gathered tokens are put back. Integers only. All indices of segments are positions in
// Layout::segments(rank).
#pragma once

#include <cstdint>
#include <vector>

#include "hybridcp/layout.h"
#include "layout/rows.h"

namespace hybridcp {

/// Rows that move for a causal window: for each local segment the (width - 1) tokens before it in
/// its document, from as many predecessors as it takes. Rows before the document's start stay zero.
/// Targets are rows of the receiver's halo, flat [num_segments * (width - 1)].
struct HaloExchange {
    int width = 0;
    std::int64_t num_segments = 0;
    std::vector<RowMessage> sends;     // at most one per peer, by ascending peer
    std::vector<RowMessage> receives;  // likewise
    std::vector<RowRun> local;         // rows that this rank already holds
};

/// One message of boundary states: those of all documents whose chain goes from a segment at
/// `chain_pos` on one rank to its successor on another. `segments` are the local ones (the senders
/// or the receivers).
struct StateMessage {
    int peer = 0;
    std::int64_t chain_pos = 0;  // of the sending segment
    std::vector<std::int64_t> segments;
};

/// The chain links of a rank. Waits happen in ascending chain_pos forward (descending backward), so
/// no cycle of waits exists whatever the layout.
struct StateExchange {
    std::vector<StateMessage> receives;   // from predecessors, ascending chain_pos, then peer
    std::vector<StateMessage> sends;      // to successors, likewise
    std::vector<std::int64_t> chain_pos;  // of each local segment
    std::vector<std::int64_t>
        local_predecessor;              // local segment whose end state starts this one, or -1
    std::vector<bool> has_predecessor;  // local or remote
    std::vector<bool> has_successor;
    std::int64_t max_chain_length = 0;  // over all documents
};

/// The segments of all ranks that take part in an all-gather of summaries: those of documents of
/// more than one segment, but for the last of each chain. Every rank sends `slots_per_rank` slots,
/// unused ones padded.
struct SummaryGather {
    struct Slot {
        int rank = 0;
        std::int64_t slot = 0;
    };
    std::int64_t slots_per_rank = 0;
    std::vector<std::int64_t> slots_of_rank;   // [P] that each rank fills
    std::vector<std::int64_t> local_segments;  // local segment of each slot that this rank fills
    std::vector<std::vector<Slot>>
        predecessors;  // per local segment: all earlier segments, causal order
    std::vector<std::vector<Slot>>
        successors;  // per local segment: all later participants, causal order
};

[[nodiscard]] HaloExchange make_halo_exchange(const Layout& layout, int rank, int width);
[[nodiscard]] StateExchange make_state_exchange(const Layout& layout, int rank);

/// With `reverse`, the gather of gradient summaries: every segment but the first of each chain
/// takes part, and `predecessors` stays empty. Without it both are filled: backward reads the M of
/// later segments from the forward gather.
[[nodiscard]] SummaryGather make_summary_gather(const Layout& layout, int rank, bool reverse);

/// Tokens gathered from all ranks, one rank after another, stand in rank-major order; entry i says
/// which of them is token i of the flat order. Empty when that is the identity.
[[nodiscard]] std::vector<std::int64_t> rank_major_to_flat(const Layout& layout);

}  // namespace hybridcp
