// Summaries over the chunks that matter, all lanes of a kind side by side. Lanes end together (in
// reverse: start together), so that those still to come are a prefix of the list.
#include <ATen/ATen.h>

#include "kernels/gdn/eager.h"

namespace hybridcp::gdn {
namespace {

using at::Tensor;

/// Lanes that keep more than `step` chunks: the first ones.
std::int64_t num_running(const std::vector<Lane>& lanes, std::int64_t step) {
    std::int64_t count = 0;
    while (count < static_cast<std::int64_t>(lanes.size()) &&
           lanes[static_cast<std::size_t>(count)].kept > step) {
        ++count;
    }
    return count;
}

template <typename RowOf>
Tensor rows_of(const std::vector<Lane>& lanes, std::int64_t count, RowOf row_of) {
    Tensor rows = at::empty({count}, at::kLong);
    std::int64_t* row = rows.mutable_data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < count; ++i) {
        row[i] = row_of(lanes[static_cast<std::size_t>(i)]);
    }
    return rows;
}

std::int64_t longest(const std::vector<Lane>& lanes) {
    return lanes.empty() ? 0 : lanes.front().kept;
}

/// Rows of a tensor with one matrix per place and head.
Tensor place_rows(const std::vector<Lane>& lanes, std::int64_t num_heads) {
    return rows_of(lanes, static_cast<std::int64_t>(lanes.size()),
                   [&](const Lane& lane) { return lane.place * num_heads + lane.head; });
}

/// End states of lanes [L, K, W] from `first`; columns beyond V are written no values.
Tensor walk_forward(const ChunkFactors& f,
                    const ChunkLayout& layout,
                    const std::vector<Lane>& lanes,
                    const Tensor& values,
                    Tensor state) {
    const std::int64_t heads = values.size(0) / std::max<std::int64_t>(layout.num_chunks(), 1);
    for (std::int64_t left = longest(lanes) - 1; left >= 0; --left) {
        const Tensor rows = rows_of(lanes, num_running(lanes, left), [&](const Lane& lane) {
            return layout.row(lane.chunks - 1 - left, lane.place) * heads + lane.head;
        });
        Tensor running = state.narrow(0, 0, rows.numel());
        const Tensor new_values =
            at::constant_pad_nd(values.index_select(0, rows), {0, state.size(2) - values.size(2)});
        new_values.baddbmm_(f.k_erase.index_select(0, rows), running, 1, -1);
        running.mul_(f.chunk_decay.index_select(0, rows));
        running.baddbmm_(f.k_write.index_select(0, rows).mT(), new_values);
    }
    return state;
}

}  // namespace

Tensor summarize_windows(const ChunkFactors& factors,
                         const ChunkLayout& layout,
                         const SummaryWindows& windows,
                         const Tensor& values) {
    const std::int64_t K = factors.k.size(2);
    const std::int64_t V = values.size(2);
    const std::int64_t heads = factors.group * (factors.k.size(0) / layout.num_chunks());
    Tensor summary = at::zeros({layout.num_segments() * heads, K, V + K}, values.options());
    const auto count = static_cast<std::int64_t>(windows.dependent().size());
    if (count > 0) {
        const Tensor zero = at::zeros({count, K, V}, values.options());
        const Tensor one = at::eye(K, values.options()).expand({count, K, K});
        summary.index_copy_(
            0, place_rows(windows.dependent(), heads),
            walk_forward(factors, layout, windows.dependent(), values, at::cat({zero, one}, -1)));
    }
    const auto count_independent = static_cast<std::int64_t>(windows.independent().size());
    summary.narrow(2, 0, V).index_copy_(
        0, place_rows(windows.independent(), heads),
        walk_forward(factors, layout, windows.independent(), values,
                     at::zeros({count_independent, K, V}, values.options())));
    return summary;
}

Tensor gradient_summary_windows(const ChunkFactors& factors,
                                const ChunkLayout& layout,
                                const SummaryWindows& windows,
                                const OutputGradient& gradient) {
    const std::vector<Lane>& lanes = windows.prefixes();
    const std::int64_t heads = factors.group * (factors.k.size(0) / layout.num_chunks());
    Tensor state = at::zeros(
        {static_cast<std::int64_t>(lanes.size()), factors.k.size(2), gradient.values.size(2)},
        gradient.values.options());
    for (std::int64_t step = longest(lanes) - 1; step >= 0; --step) {
        const Tensor rows = rows_of(lanes, num_running(lanes, step), [&](const Lane& lane) {
            return layout.row(step, lane.place) * heads + lane.head;
        });
        Tensor running = state.narrow(0, 0, rows.numel());
        const Tensor d_values = gradient.values.index_select(0, rows);
        d_values.baddbmm_(factors.k_write.index_select(0, rows), running);
        running.mul_(factors.chunk_decay.index_select(0, rows));
        running.baddbmm_(factors.q_read.index_select(0, rows).mT(),
                         gradient.d_o.index_select(0, rows));
        running.baddbmm_(factors.k_erase.index_select(0, rows).mT(), d_values, 1, -1);
    }
    return at::zeros({layout.num_segments() * heads, state.size(1), state.size(2)}, state.options())
        .index_copy(0, place_rows(lanes, heads), state);
}

}  // namespace hybridcp::gdn
