#include "kernels/gdn/cuda/host_tables.h"

#include <algorithm>

namespace hybridcp::gdn {
namespace {

/// A piece makes its entry state by walking back; shorter ones would do little else.
constexpr std::int64_t kLeastChunksOfPiece = 16;

std::int64_t num_pieces(std::int64_t chunks, std::int64_t chunks_of_share) {
    const std::int64_t most = std::max<std::int64_t>(chunks / kLeastChunksOfPiece, 1);
    return std::clamp<std::int64_t>(chunks / std::max<std::int64_t>(chunks_of_share, 1), 1, most);
}

}  // namespace

HostTables make_host_tables(const std::vector<std::int64_t>& offsets,
                            std::int64_t value_heads,
                            int multiprocessors) {
    HostTables tables;
    for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
        const auto first = static_cast<std::int32_t>(tables.chunks.size());
        for (std::int64_t token = offsets[i]; token < offsets[i + 1]; token += cuda::kChunkTokens) {
            const std::int64_t left = offsets[i + 1] - token;
            tables.chunks.push_back({.token = static_cast<std::int32_t>(token),
                                     .tokens = static_cast<std::int32_t>(
                                         std::min<std::int64_t>(left, cuda::kChunkTokens))});
        }
        const auto count = static_cast<std::int32_t>(tables.chunks.size()) - first;
        if (count == 0) {
            tables.empty_segments.push_back(static_cast<std::int64_t>(i));
        } else {
            tables.whole_segments.push_back({.segment = static_cast<std::int32_t>(i),
                                             .first_chunk = first,
                                             .chunks = count,
                                             .index = 0,
                                             .pieces = 1});
        }
    }
    const std::int64_t blocks_of_piece = 2 * value_heads;
    const std::int64_t share =
        (static_cast<std::int64_t>(tables.chunks.size()) * blocks_of_piece + multiprocessors - 1) /
        multiprocessors;
    for (cuda::Piece piece : tables.whole_segments) {
        piece.pieces = static_cast<std::int32_t>(num_pieces(piece.chunks, share));
        for (piece.index = 0; piece.index < piece.pieces; ++piece.index) {
            tables.pieces.push_back(piece);
        }
    }
    std::stable_sort(tables.pieces.begin(), tables.pieces.end(),
                     [](const cuda::Piece& a, const cuda::Piece& b) {
                         return a.chunks / a.pieces > b.chunks / b.pieces;
                     });
    std::stable_sort(
        tables.whole_segments.begin(), tables.whole_segments.end(),
        [](const cuda::Piece& a, const cuda::Piece& b) { return a.chunks > b.chunks; });
    return tables;
}

}  // namespace hybridcp::gdn
