// The schedule of ring attention, integers only: keys and values go round all ranks, downwards,
// from rank r to r - 1, and in step s rank r attends those that started on rank r + s (mod P). A
// segment of keys travels only as far as some rank ahead still has queries that see it. On equal
// zigzag shards that drops the back half after rank 0, a quarter of all traffic (docs/modes.md).
#pragma once

#include <cstdint>
#include <vector>

#include "hybridcp/layout.h"
#include "layout/rows.h"

namespace hybridcp {

/// Local queries [q_begin, q_end) attend rows [kv_begin, kv_end) of the keys that the rank holds in
/// the step: all of them, or (causal) aligned at the end, the last query all and the one before it
/// all but the last.
struct RingBlock {
    std::int64_t q_begin = 0;
    std::int64_t q_end = 0;
    std::int64_t kv_begin = 0;
    std::int64_t kv_end = 0;
    bool causal = false;
    bool operator==(const RingBlock&) const = default;
};

/// One step of one rank. The rows that it holds are its own shard in the first step, then the
/// message received in the step before, in their order on `origin`. A message without rows is not
/// sent.
struct RingStep {
    int origin = 0;                 // whose keys and values these are
    std::int64_t num_rows = 0;      // held
    std::vector<RingBlock> blocks;  // by ascending queries and keys; no query is in two
    /// What goes on: `source` is a row held, `target` a row that the receiver holds in its next
    /// step.
    RowMessage send;
    /// Gradients of the rows in `blocks` go back to their origin: `source` is a row held, `target`
    /// a local row of the origin. The second is the same message seen by the origin, from the rank
    /// that attends this rank's keys in the same step. In the first step both name this rank.
    RowMessage gradient_send;
    RowMessage gradient_receive;
};

/// P steps. Over them each query meets each key that it sees exactly once.
using RingSchedule = std::vector<RingStep>;

/// Errors: UsageError for a rank that the layout does not have.
[[nodiscard]] RingSchedule make_ring_schedule(const Layout& layout, int rank);

}  // namespace hybridcp
