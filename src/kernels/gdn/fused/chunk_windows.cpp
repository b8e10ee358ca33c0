#include "kernels/gdn/fused/chunk_windows.h"

#include <algorithm>

#include "kernels/gdn/backends.h"

namespace hybridcp::gdn {
namespace {

/// Summed log decay of each chunk of tokens begin .. end - 1 and head: [chunks, heads].
std::vector<double> chunk_decays(const at::Tensor& g,
                                 std::int64_t begin,
                                 std::int64_t end,
                                 std::int64_t chunk_tokens) {
    const std::int64_t heads = g.size(1),
                       num_chunks = (end - begin + chunk_tokens - 1) / chunk_tokens;
    std::vector<double> sums(static_cast<std::size_t>(num_chunks * heads), 0.0);
    const float* values = g.data_ptr<float>();
    for (std::int64_t t = begin; t < end; ++t) {
        double* chunk = sums.data() + (t - begin) / chunk_tokens * heads;
        const float* row = values + t * g.stride(0);
        for (std::int64_t h = 0; h < heads; ++h) {
            chunk[h] += std::max(static_cast<double>(row[h]), kLogDecayFloor);
        }
    }
    return sums;
}

}  // namespace

ChunkWindows make_chunk_windows(const at::Tensor& g,
                                const std::vector<std::int64_t>& offsets,
                                std::int64_t chunk_tokens,
                                double floor) {
    ChunkWindows windows;
    const std::int64_t heads = g.size(1);
    for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
        const std::vector<double> sums = chunk_decays(g, offsets[i], offsets[i + 1], chunk_tokens);
        const std::int64_t num_chunks = static_cast<std::int64_t>(sums.size()) / heads;
        for (std::int64_t h = 0; h < heads; ++h) {
            const auto decay = [&](std::int64_t chunk) {
                return sums[static_cast<std::size_t>(chunk * heads + h)];
            };
            std::int64_t first = num_chunks;
            double after = 0;
            for (; first > 0 && after >= floor; --first) {
                after += decay(first - 1);
            }
            std::int64_t count = 0;
            double before = 0;
            for (; count < num_chunks && before >= floor; ++count) {
                before += decay(count);
            }
            const bool independent = after < floor;
            windows.first_chunk.push_back(independent ? first : 0);
            windows.prefix_count.push_back(count);
            windows.independent.push_back(independent);
        }
    }
    return windows;
}

}  // namespace hybridcp::gdn
