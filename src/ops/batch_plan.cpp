#include "ops/batch_plan.h"

#include "hybridcp/error.h"

namespace hybridcp {

namespace {

at::Tensor index_tensor(const std::vector<std::int64_t>& values, const at::Device& device) {
    return at::tensor(values, at::TensorOptions().dtype(at::kLong)).to(device);
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
    plan.rank = rank;
    for (int r = 0; r < layout.num_ranks(); ++r) {
        plan.tokens_per_rank.push_back(layout.num_local_tokens(r));
    }
    plan.segment_offsets.push_back(0);
    const std::vector<std::int64_t>& document_offsets = layout.document_offsets();
    for (const Segment& segment : layout.segments(rank)) {
        const std::int64_t q_begin = plan.segment_offsets.back();
        const std::int64_t kv_begin = document_offsets[static_cast<std::size_t>(segment.doc)];
        plan.segment_offsets.push_back(q_begin + segment.size());
        plan.local_blocks.push_back({.q_begin = q_begin,
                                     .q_end = q_begin + segment.size(),
                                     .kv_begin = kv_begin,
                                     .kv_end = kv_begin + segment.end});
    }
    for (std::size_t doc = 0; doc + 1 < document_offsets.size(); ++doc) {
        const std::int64_t begin = document_offsets[doc];
        const std::int64_t end = document_offsets[doc + 1];
        if (end > begin) {
            plan.document_blocks.push_back(
                {.q_begin = begin, .q_end = end, .kv_begin = begin, .kv_end = end});
        }
    }
    plan.halo = make_halo_exchange(layout, rank, conv_width);
    plan.states = make_state_exchange(layout, rank);
    plan.prefix = make_summary_gather(layout, rank, /*reverse=*/false);
    plan.suffix = make_summary_gather(layout, rank, /*reverse=*/true);
    plan.positions = index_tensor(layout.positions(rank), device);
    plan.flat_indices = index_tensor(layout.flat_indices(rank), device);
    const std::vector<std::int64_t> order = rank_major_to_flat(layout);
    if (!order.empty()) {
        std::vector<std::int64_t> inverse(order.size());
        for (std::size_t i = 0; i < order.size(); ++i) {
            inverse[static_cast<std::size_t>(order[i])] = static_cast<std::int64_t>(i);
        }
        plan.rank_major_to_flat = index_tensor(order, device);
        plan.flat_to_rank_major = index_tensor(inverse, device);
    }
    return plan;
}

}  // namespace hybridcp
