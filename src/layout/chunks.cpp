#include "layout/chunks.h"

#include <algorithm>

namespace hybridcp {

namespace {

int rank_of_chunk(LayoutKind kind, int chunk, int num_ranks) {
    const int pair = chunk / 2;
    switch (kind) {
        case LayoutKind::kZigzag:  // 0 1 2 ... 2 1 0
            return std::min(chunk, 2 * num_ranks - 1 - chunk);
        case LayoutKind::kFolded:  // 0 0 2 2 4 4 ... 5 5 3 3 1 1
            return 2 * pair < num_ranks ? 2 * pair : 2 * (num_ranks - 1 - pair) + 1;
        case LayoutKind::kContiguous:
            break;
    }
    return pair;
}

}  // namespace

std::vector<int> chunk_ranks(LayoutKind kind, int num_ranks) {
    std::vector<int> ranks;
    ranks.reserve(2 * static_cast<std::size_t>(num_ranks));
    for (int chunk = 0; chunk < 2 * num_ranks; ++chunk) {
        ranks.push_back(rank_of_chunk(kind, chunk, num_ranks));
    }
    return ranks;
}

std::vector<std::int64_t> chunk_boundaries(std::int64_t length,
                                           int num_ranks,
                                           std::int64_t offset) {
    const std::int64_t num_chunks = std::int64_t{2} * num_ranks;
    const std::int64_t first_turn = offset % num_chunks;
    std::vector<std::int64_t> boundaries{0};
    for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const std::int64_t turn = chunk % 2 * num_ranks + chunk / 2;
        const std::int64_t turns_from_first = (turn - first_turn + num_chunks) % num_chunks;
        const std::int64_t extra = turns_from_first < length % num_chunks ? 1 : 0;
        boundaries.push_back(boundaries.back() + length / num_chunks + extra);
    }
    return boundaries;
}

}  // namespace hybridcp
