#include "ops/batch_plan.h"

#include <algorithm>
#include <numeric>

#include "hybridcp/error.h"
#include "ops/sharded.h"

namespace hybridcp {

namespace {

at::Tensor index_tensor(const std::vector<std::int64_t>& values, const at::Device& device) {
    return at::tensor(values, at::TensorOptions().dtype(at::kLong)).to(device);
}

/// Runs in order, seen from one end.
RowSelection select_rows(const std::vector<RowRun>& runs,
                         std::int64_t RowRun::* end,
                         const at::Device& device) {
    RowSelection selection;
    bool one_run = true;
    std::vector<std::int64_t> rows;
    for (const RowRun& run : runs) {
        one_run = one_run && (rows.empty() || run.*end == rows.back() + 1);
        for (std::int64_t i = 0; i < run.count; ++i) {
            rows.push_back(run.*end + i);
        }
    }
    selection.first = rows.empty() ? 0 : rows.front();
    selection.count = static_cast<std::int64_t>(rows.size());
    if (!one_run) {
        selection.index = index_tensor(rows, device);
    }
    return selection;
}

std::vector<RowRun> all_runs(const std::vector<RowMessage>& messages) {
    std::vector<RowRun> runs;
    for (const RowMessage& message : messages) {
        runs.insert(runs.end(), message.runs.begin(), message.runs.end());
    }
    return runs;
}

std::shared_ptr<const Conversion> make_conversion(const Layout& from,
                                                  const Layout& to,
                                                  int rank,
                                                  const at::Device& device) {
    Conversion conversion;
    conversion.route = make_route(from, to, rank);
    conversion.from = from.tag();
    conversion.to = to.tag();
    const auto counts = [&](const std::vector<RowMessage>& messages) {
        std::vector<std::int64_t> rows(static_cast<std::size_t>(from.num_ranks()), 0);
        for (const RowMessage& message : messages) {
            rows[static_cast<std::size_t>(message.peer)] = message.num_rows;
        }
        return rows;
    };
    const Route& route = conversion.route;
    conversion.send_counts = counts(route.sends);
    conversion.receive_counts = counts(route.receives);
    conversion.sent = select_rows(all_runs(route.sends), &RowRun::source, device);
    conversion.received = select_rows(all_runs(route.receives), &RowRun::target, device);
    conversion.kept_source = select_rows(route.kept, &RowRun::source, device);
    conversion.kept_target = select_rows(route.kept, &RowRun::target, device);
    return std::make_shared<const Conversion>(std::move(conversion));
}

StateIndices make_state_indices(const StateExchange& states, const at::Device& device) {
    StateIndices indices;
    for (const StateMessage& message : states.receives) {
        indices.receives.push_back(index_tensor(message.segments, device));
    }
    for (const StateMessage& message : states.sends) {
        indices.sends.push_back(index_tensor(message.segments, device));
    }
    for (std::int64_t pos = 0; pos < states.max_chain_length; ++pos) {
        const auto at_pos = [&](const std::vector<bool>& wanted) {
            std::vector<std::int64_t> segments;
            for (std::size_t i = 0; i < states.chain_pos.size(); ++i) {
                if (states.chain_pos[i] == pos && wanted[i]) {
                    segments.push_back(static_cast<std::int64_t>(i));
                }
            }
            return segments.empty() ? at::Tensor() : index_tensor(segments, device);
        };
        indices.continued.push_back(at_pos(states.has_successor));
        indices.preceded.push_back(at_pos(states.has_predecessor));
    }
    return indices;
}

at::Tensor index_or_none(const std::vector<std::int64_t>& values, const at::Device& device) {
    return values.empty() ? at::Tensor() : index_tensor(values, device);
}

DocumentEnds make_segment_ends(const Layout& layout, int rank, const at::Device& device) {
    std::vector<std::int64_t> first, first_docs, last, last_docs, empty;
    const auto segments = layout.segments(rank);
    for (std::size_t i = 0; i < segments.size(); ++i) {
        const std::int64_t doc = segments[i].doc;
        if (segments[i].begin == 0) {
            first.push_back(static_cast<std::int64_t>(i));
            first_docs.push_back(doc);
        }
        if (segments[i].end == layout.document_lengths()[static_cast<std::size_t>(doc)]) {
            last.push_back(static_cast<std::int64_t>(i));
            last_docs.push_back(doc);
        }
    }
    for (std::int64_t doc = 0; rank == 0 && doc < layout.num_documents(); ++doc) {
        if (layout.chain(doc).empty()) {
            empty.push_back(doc);
        }
    }
    return {.num_documents = layout.num_documents(),
            .first_segments = index_or_none(first, device),
            .first_documents = index_or_none(first_docs, device),
            .last_segments = index_or_none(last, device),
            .last_documents = index_or_none(last_docs, device),
            .empty_documents = index_or_none(empty, device)};
}

/// Where the segments are the documents themselves, empty ones too.
DocumentEnds make_document_ends(const Layout& layout, const at::Device& device) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(layout.num_documents()));
    std::iota(all.begin(), all.end(), 0);
    const at::Tensor index = index_or_none(all, device);
    return {.num_documents = layout.num_documents(),
            .first_segments = index,
            .first_documents = index,
            .last_segments = index,
            .last_documents = index,
            .empty_documents = {}};
}

ConvEnds make_conv_ends(const Layout& layout, int rank, int width, const at::Device& device) {
    const std::int64_t rows = width - 1;
    std::vector<std::int64_t> halo, halo_initial, final, tokens, kept, kept_initial;
    std::int64_t index = 0;
    for (const Segment& segment : layout.segments(rank)) {
        for (std::int64_t i = 0; i + segment.begin < rows; ++i) {
            halo.push_back(index * rows + i);
            halo_initial.push_back(segment.doc * rows + segment.begin + i);
        }
        const std::int64_t length =
            layout.document_lengths()[static_cast<std::size_t>(segment.doc)];
        for (std::int64_t pos = std::max(segment.begin, length - rows); pos < segment.end; ++pos) {
            final.push_back((segment.doc + 1) * rows - (length - pos));
            tokens.push_back(segment.local_begin + pos - segment.begin);
        }
        ++index;
    }
    for (std::int64_t doc = 0; rank == 0 && doc < layout.num_documents(); ++doc) {
        const std::int64_t length = layout.document_lengths()[static_cast<std::size_t>(doc)];
        for (std::int64_t i = 0; i < rows - length; ++i) {
            kept.push_back(doc * rows + i);
            kept_initial.push_back(doc * rows + length + i);
        }
    }
    return {.halo_rows = index_or_none(halo, device),
            .halo_initial = index_or_none(halo_initial, device),
            .final_rows = index_or_none(final, device),
            .final_tokens = index_or_none(tokens, device),
            .final_kept = index_or_none(kept, device),
            .final_kept_initial = index_or_none(kept_initial, device)};
}

void add_attention_blocks(BatchPlan& plan) {
    const std::vector<std::int64_t>& offsets = plan.layout.document_offsets();
    for (const Segment& segment : plan.layout.segments(plan.rank)) {
        const std::int64_t kv_begin = offsets[static_cast<std::size_t>(segment.doc)];
        plan.local_blocks.push_back({.q_begin = segment.local_begin,
                                     .q_end = segment.local_begin + segment.size(),
                                     .kv_begin = kv_begin,
                                     .kv_end = kv_begin + segment.end});
    }
    for (std::size_t doc = 0; doc + 1 < offsets.size(); ++doc) {
        if (offsets[doc + 1] > offsets[doc]) {
            plan.document_blocks.push_back({.q_begin = offsets[doc],
                                            .q_end = offsets[doc + 1],
                                            .kv_begin = offsets[doc],
                                            .kv_end = offsets[doc + 1]});
        }
    }
    for (const RingStep& step : plan.ring) {
        std::vector<AttentionBlock>& blocks = plan.ring_blocks.emplace_back();
        for (const RingBlock& block : step.blocks) {
            blocks.push_back(
                {block.q_begin, block.q_end, block.kv_begin, block.kv_end, block.causal});
        }
    }
}

void add_permutations(BatchPlan& plan, const at::Device& device) {
    plan.positions = index_tensor(plan.layout.positions(plan.rank), device);
    plan.flat_indices = index_tensor(plan.layout.flat_indices(plan.rank), device);
    const std::vector<std::int64_t> order = rank_major_to_flat(plan.layout);
    if (order.empty()) {
        return;
    }
    std::vector<std::int64_t> inverse(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        inverse[static_cast<std::size_t>(order[i])] = static_cast<std::int64_t>(i);
    }
    plan.rank_major_to_flat = index_tensor(order, device);
    plan.flat_to_rank_major = index_tensor(inverse, device);
}

}  // namespace

BatchPlan make_batch_plan(const Layout& layout,
                          int rank,
                          int conv_width,
                          const at::Device& device) {
    HCP_CHECK(rank >= 0 && rank < layout.num_ranks(),
              "batch plan of rank {} in a layout of {} ranks", rank, layout.num_ranks());
    BatchPlan plan;
    plan.layout = layout;
    plan.tag = layout.tag();
    plan.rank = rank;
    for (int r = 0; r < layout.num_ranks(); ++r) {
        plan.tokens_per_rank.push_back(layout.num_local_tokens(r));
    }
    plan.segment_offsets.push_back(0);
    for (const Segment& segment : layout.segments(rank)) {
        plan.segment_offsets.push_back(plan.segment_offsets.back() + segment.size());
    }
    plan.segments = GdnSegments(plan.segment_offsets);
    plan.documents = GdnSegments(layout.document_offsets());
    plan.segment_ends = make_segment_ends(layout, rank, device);
    plan.document_ends = make_document_ends(layout, device);
    plan.halo = make_halo_exchange(layout, rank, conv_width);
    plan.conv_ends = make_conv_ends(layout, rank, conv_width, device);
    plan.states = make_state_exchange(layout, rank);
    plan.state_indices = make_state_indices(plan.states, device);
    plan.prefix = make_summary_gather(layout, rank, /*reverse=*/false);
    plan.suffix = make_summary_gather(layout, rank, /*reverse=*/true);
    plan.forward_scan = make_scan_schedule(layout, rank, /*reverse=*/false);
    plan.reverse_scan = make_scan_schedule(layout, rank, /*reverse=*/true);
    plan.ring = make_ring_schedule(layout, rank);
    add_attention_blocks(plan);
    add_permutations(plan, device);
    return plan;
}

Layout stream_layout(const std::vector<std::int64_t>& document_lengths, const Parallel& parallel) {
    return Layout::make({.kind = parallel.layout_kind,
                         .cut = parallel.layout_cut,
                         .num_ranks = parallel.cp,
                         .document_lengths = document_lengths});
}

BatchPlan make_batch_plan(const BatchPlanOptions& options) {
    const Parallel& parallel = options.parallel;
    BatchPlan plan = make_batch_plan(stream_layout(options.document_lengths, parallel),
                                     options.rank, options.conv_width, options.device);
    if (parallel.cp == 1) {
        return plan;
    }
    if (parallel.linear_attention_mode == LinearAttentionMode::kGatherHidden) {
        const Layout whole =
            Layout::make({.num_ranks = 1, .document_lengths = options.document_lengths});
        plan.linear = std::make_shared<const BatchPlan>(
            make_batch_plan(whole, 0, options.conv_width, options.device));
    } else if (parallel.linear_layout_kind != parallel.layout_kind) {
        Parallel linear = parallel;
        linear.layout_kind = parallel.linear_layout_kind;
        const Layout layout = stream_layout(options.document_lengths, linear);
        plan.linear = std::make_shared<const BatchPlan>(
            make_batch_plan(layout, options.rank, options.conv_width, options.device));
        plan.to_linear = make_conversion(plan.layout, layout, options.rank, options.device);
        plan.from_linear = make_conversion(layout, plan.layout, options.rank, options.device);
    }
    return plan;
}

void check_layout(const std::string& op,
                  std::initializer_list<const Sharded*> tensors,
                  const BatchPlan& plan) {
    for (const Sharded* tensor : tensors) {
        if (tensor->layout != plan.tag) {
            const bool same_kind =
                tensor->layout.kind == plan.tag.kind && tensor->layout.cut == plan.tag.cut;
            throw UsageError(
                fmt::format("{}: the tensor is in layout {}{}, the op runs in {}: {}", op,
                            to_string(tensor->layout), same_kind ? " of other documents" : "",
                            to_string(plan.tag),
                            same_kind ? "use the plan of the tensor's batch" : "convert it first"));
        }
        HCP_CHECK_EQ(tensor->local.size(0), plan.num_local_tokens(), "{}: local tokens of the plan",
                     op);
    }
}

}  // namespace hybridcp
