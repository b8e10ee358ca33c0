// Everything that the ops of one rank need to know about one batch, computed once from its Layout:
// segment offsets, exchanges, positions, attention blocks, permutations, and the index tensors that
// they use on the device. No op computes metadata of its own, so no layer makes the host wait for a
// device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "hybridcp/layout.h"
#include "hybridcp/parallel.h"
#include "kernels/attention/attention.h"
#include "kernels/gdn/gdn.h"
#include "layout/exchange.h"
#include "layout/ring.h"
#include "layout/route.h"
#include "layout/scan.h"

namespace hybridcp {

/// Local rows: [first, first + count), or those that `index` lists.
struct RowSelection {
    std::int64_t first = 0;
    std::int64_t count = 0;
    at::Tensor index;  // [count] int64; undefined for one run
};

/// A route and the index tensors of its ends.
struct Conversion {
    Route route;
    LayoutTag from, to;
    std::vector<std::int64_t> send_counts, receive_counts;  // rows, [P]
    RowSelection sent, received;                            // by ascending peer
    RowSelection kept_source, kept_target;
};

/// Index tensors of a StateExchange, [n] int64 each: local segments.
struct StateIndices {
    std::vector<at::Tensor> receives, sends;      // of each message
    std::vector<at::Tensor> continued, preceded;  // by chain position: those with a successor
                                                  // (predecessor); undefined where there is none
};

/// Where documents begin and end among segments: index tensors, [n] int64, undefined where there
/// are none. For calls that go on from an earlier one.
struct DocumentEnds {
    std::int64_t num_documents = 0;
    at::Tensor first_segments, first_documents;  // segments that begin a document, and which
    at::Tensor last_segments, last_documents;    // segments that end one
    at::Tensor empty_documents;                  // on rank 0: documents without a segment
};

/// Rows of the convolution that are not in this call's tokens: index tensors, undefined where there
/// are none; `initial` rows are [N * (W-1)].
struct ConvEnds {
    at::Tensor halo_rows, halo_initial;         // halo rows [segments * (W-1)] from initial rows
    at::Tensor final_rows, final_tokens;        // final rows [N * (W-1)] from local tokens
    at::Tensor final_kept, final_kept_initial;  // on rank 0: final rows from initial rows
};

struct BatchPlan {
    Layout layout;
    LayoutTag tag;
    int rank = 0;
    std::vector<std::int64_t> tokens_per_rank;  // [P]
    std::vector<std::int64_t> segment_offsets;  // of the local segments, [N + 1]
    GdnSegments segments = GdnSegments({0});    // the local segments
    GdnSegments documents = GdnSegments({0});   // all documents, flat order
    DocumentEnds segment_ends, document_ends;
    HaloExchange halo;
    ConvEnds conv_ends;
    StateExchange states;
    StateIndices state_indices;
    SummaryGather prefix;                         // for state summaries
    SummaryGather suffix;                         // for gradient summaries
    ScanSchedule forward_scan, reverse_scan;      // of the mode `scan`
    std::vector<AttentionBlock> local_blocks;     // local queries against keys in flat order
    std::vector<AttentionBlock> document_blocks;  // all queries against all keys, flat order
    at::Tensor positions;                         // [T_local] int64, position in its document
    at::Tensor flat_indices;                      // [T_local] int64, index in the flat order
    at::Tensor rank_major_to_flat;                // [T] int64, or undefined for the identity
    at::Tensor flat_to_rank_major;                // its inverse
    /// Ring attention: its steps, and their blocks as the kernel takes them.
    RingSchedule ring;
    std::vector<std::vector<AttentionBlock>> ring_blocks;
    /// Of the linear-attention layers, where it is not this plan: in their own layout, or (mode
    /// gather_hidden) of the whole documents on one rank.
    std::shared_ptr<const BatchPlan> linear;
    std::shared_ptr<const Conversion> to_linear, from_linear;  // where their layouts differ

    [[nodiscard]] std::int64_t num_local_tokens() const { return segment_offsets.back(); }
};

/// The plan of one layout.
[[nodiscard]] BatchPlan make_batch_plan(const Layout& layout,
                                        int rank,
                                        int conv_width,
                                        const at::Device& device);

/// What the plan of a batch depends on.
struct BatchPlanOptions {
    std::vector<std::int64_t> document_lengths;
    Parallel parallel;
    int rank = 0;
    int conv_width = 4;
    at::Device device = at::kCPU;
};
/// The layout of the stream.
[[nodiscard]] Layout stream_layout(const std::vector<std::int64_t>& document_lengths,
                                   const Parallel& parallel);
/// The plan of the stream, and with it that of the linear-attention layers where it is another.
[[nodiscard]] BatchPlan make_batch_plan(const BatchPlanOptions& options);

}  // namespace hybridcp
