// Chunks and pieces of packed segments (src/kernels/gdn/cuda/host_tables.cpp).
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/gdn/cuda/host_tables.h"

namespace hybridcp::gdn {
namespace {

constexpr int kH200 = 132;  // multiprocessors

std::size_t pieces_of_one(std::int64_t tokens, std::int64_t value_heads) {
    return make_host_tables({0, tokens}, value_heads, kH200).pieces.size();
}

TEST(HostTables, ChunksStayInTheirSegments) {
    const HostTables tables = make_host_tables({0, 1, 1, 130, 194, 194}, 4, kH200);
    std::vector<std::pair<int, int>> chunks;
    for (const cuda::Chunk& chunk : tables.chunks) {
        chunks.emplace_back(chunk.token, chunk.tokens);
    }
    const std::vector<std::pair<int, int>> expected = {
        {0, 1}, {1, 64}, {65, 64}, {129, 1}, {130, 64}};
    EXPECT_EQ(chunks, expected);
    EXPECT_EQ(tables.empty_segments, (std::vector<std::int64_t>{1, 4}));
    ASSERT_EQ(tables.whole_segments.size(), 3U);
    EXPECT_EQ(tables.whole_segments[0].segment, 2);  // the longest first
    EXPECT_EQ(tables.whole_segments[0].first_chunk, 1);
    EXPECT_EQ(tables.whole_segments[0].chunks, 3);
}

TEST(HostTables, PiecesFillTheMultiprocessorsOnce) {
    EXPECT_EQ(pieces_of_one(32768, 64), 1U);
    EXPECT_EQ(pieces_of_one(32768, 32), 2U);
    EXPECT_EQ(pieces_of_one(32768, 16), 4U);
    EXPECT_EQ(pieces_of_one(32768, 8), 8U);
    EXPECT_EQ(pieces_of_one(8192, 32), 2U);
    EXPECT_EQ(pieces_of_one(1024, 1), 1U);  // too short to cut
    EXPECT_EQ(pieces_of_one(0, 8), 0U);
    for (const std::int64_t tokens : {100, 5000, 40000, 131072}) {
        for (const std::int64_t heads : {1, 3, 8, 20, 33, 64, 100}) {
            const HostTables tables = make_host_tables({0, tokens, tokens + 700}, heads, kH200);
            for (const cuda::Piece& piece : tables.pieces) {
                EXPECT_GE(piece.chunks / piece.pieces, piece.pieces == 1 ? 1 : 16);
                EXPECT_LT(piece.index, piece.pieces);
            }
            EXPECT_TRUE(std::is_sorted(tables.pieces.begin(), tables.pieces.end(),
                                       [](const cuda::Piece& a, const cuda::Piece& b) {
                                           return a.chunks / a.pieces > b.chunks / b.pieces;
                                       }));
        }
    }
}

}  // namespace
}  // namespace hybridcp::gdn
