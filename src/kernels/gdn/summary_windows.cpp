#include "kernels/gdn/summary_windows.h"

#include <algorithm>

#include "hybridcp/error.h"

namespace hybridcp::gdn {

namespace {

/// Chunks from one end that matter: those with less than the floor's decay between them and that
/// end.
template <typename DecayAt>
std::int64_t count_kept(std::int64_t chunks, double floor, DecayAt decay_at) {
    double sum = 0.0;
    std::int64_t kept = 0;
    while (kept < chunks && sum >= floor) {
        sum += decay_at(kept);
        ++kept;
    }
    return kept;
}

void longest_first(std::vector<Lane>& lanes) {
    std::stable_sort(lanes.begin(), lanes.end(),
                     [](const Lane& a, const Lane& b) { return a.kept > b.kept; });
}

}  // namespace

SummaryWindows::SummaryWindows(const ChunkLayout& layout,
                               const at::Tensor& log_decay,
                               std::int64_t num_heads,
                               double floor) {
    HCP_CHECK(
        log_decay.is_cpu() && log_decay.is_contiguous() && log_decay.scalar_type() == at::kDouble &&
            log_decay.numel() == layout.num_chunks() * num_heads,
        "gdn summaries: log decays of {} chunks and {} heads", layout.num_chunks(), num_heads);
    const double* decay = log_decay.const_data_ptr<double>();
    independent_heads_.resize(static_cast<std::size_t>(layout.num_segments() * num_heads));
    for (std::int64_t place = 0; place < layout.num_segments(); ++place) {
        const std::int64_t chunks = layout.chunks_at(place);
        for (std::int64_t head = 0; head < num_heads; ++head) {
            const auto at_step = [&](std::int64_t step) {
                return decay[layout.row(step, place) * num_heads + head];
            };
            double total = 0.0;
            for (std::int64_t step = 0; step < chunks; ++step) {
                total += at_step(step);
            }
            Lane lane{.place = place, .head = head, .chunks = chunks};
            lane.kept = count_kept(chunks, floor, at_step);
            reverse_is_whole_ = reverse_is_whole_ && lane.kept == chunks;
            prefixes_.push_back(lane);
            lane.kept = chunks;
            if (total < floor) {
                lane.kept = count_kept(chunks, floor,
                                       [&](std::int64_t i) { return at_step(chunks - 1 - i); });
                independent_.push_back(lane);
                independent_heads_[static_cast<std::size_t>(layout.segment_at(place) * num_heads +
                                                            head)] = true;
            } else {
                dependent_.push_back(lane);
            }
        }
    }
    longest_first(dependent_);
    longest_first(independent_);
    longest_first(prefixes_);
}

}  // namespace hybridcp::gdn
