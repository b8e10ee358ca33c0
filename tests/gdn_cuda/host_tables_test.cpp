// Chunks and pieces of packed segments (src/kernels/gdn/cuda/host_tables.cpp).
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

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

// Runs of each segment, in order of their index.
// Every chunk of every head lies in one run, and the runs of a segment have checkpoints of their
// own but the first.
TEST(HostTables, RunsCoverTheSegments) {
    const std::vector<std::int64_t> offsets = {0, 10, 40000, 40000, 40900, 60000};
    for (const std::int32_t heads : {1, 6, 32, 64}) {
        for (const double kept : {0.0, 0.4, 1.0}) {
            const HostTables tables = make_host_tables(offsets, heads, kH200, 256, kept);
            const cuda::RunCut& cut = tables.cut;
            ASSERT_EQ(tables.first_checkpoints.size(), 5U);
            EXPECT_NEAR(cut.kept, kept * cut.length, 0.5);
            std::map<std::pair<int, int>, std::vector<int>> times;  // by segment and class
            std::set<std::int32_t> checkpoints;
            for (const cuda::Run& run : tables.runs) {
                auto& chunks = times[{run.segment, run.head_class}];
                chunks.resize(static_cast<std::size_t>(run.chunks));
                const std::int32_t begin = cut.start(run.index, run.head_class);
                const std::int32_t end =
                    std::min(cut.start(run.index + 1, run.head_class), run.chunks);
                EXPECT_LT(begin, end);
                for (std::int32_t chunk = begin; chunk < end; ++chunk) {
                    ++chunks[static_cast<std::size_t>(chunk)];
                    EXPECT_EQ(cut.run_from(chunk + 1, run.head_class), run.index + 1);
                    EXPECT_EQ(cut.keeps(chunk, run.head_class),
                              cut.start(run.index + 1, run.head_class) - chunk <= cut.kept);
                }
                if (run.index > 0) {
                    const auto segment = static_cast<std::size_t>(run.segment);
                    checkpoints.insert(tables.first_checkpoints[segment] + run.index - 1);
                }
            }
            EXPECT_EQ(times.size(), 4U * cuda::kHeadClasses);
            for (const auto& [segment, chunks] : times) {
                EXPECT_EQ(chunks, std::vector<int>(chunks.size(), 1));
            }
            EXPECT_EQ(checkpoints.size(), static_cast<std::size_t>(tables.num_checkpoints));
            EXPECT_TRUE(checkpoints.empty() || *checkpoints.rbegin() == tables.num_checkpoints - 1);
        }
    }
}

// Chunks until the last cluster has done its runs, each with three chunks before it begins, and
// those of an even share without any.
std::pair<std::int64_t, std::int64_t> steps_and_share(const HostTables& tables,
                                                      std::int64_t heads) {
    std::vector<std::int64_t> ends(kH200 / 2, 0);
    std::int64_t all = 0;
    for (const cuda::Run& run : tables.runs) {
        const std::int32_t next = tables.cut.start(run.index + 1, run.head_class);
        const std::int64_t chunks = std::max(std::min(next - tables.cut.kept, run.chunks) -
                                                 tables.cut.start(run.index, run.head_class),
                                             0);
        for (std::int64_t head = run.head_class; head < heads;
             head += cuda::kHeadClasses) {  // G = 1
            *std::min_element(ends.begin(), ends.end()) += chunks + 3;
            all += chunks;
        }
    }
    return {*std::max_element(ends.begin(), ends.end()), (all + kH200 / 2 - 1) / (kH200 / 2)};
}

TEST(HostTables, SummariesOfLongSegmentsAreJoined) {
    const HostTables tables = make_host_tables({0, 100, 100, 40000, 49000}, 8, kH200);
    ASSERT_EQ(tables.joins.size(), 1U);  // four parts, the others whole
    const cuda::Join& join = tables.joins[0];
    EXPECT_EQ(join.segment, 2);
    EXPECT_EQ(join.first_slot, 4);
    EXPECT_EQ(join.parts, 4);
    EXPECT_EQ(tables.num_slots, 8);
    std::map<int, cuda::Piece> parts;  // of slots
    for (const cuda::Piece& part : tables.summary_parts) {
        EXPECT_TRUE(parts.emplace(part.segment, part).second);
    }
    ASSERT_EQ(parts.size(), 6U);
    std::int32_t before = 0;
    for (int slot = 4; slot < 8; ++slot) {
        const cuda::Piece& part = parts.at(slot);
        EXPECT_EQ(part.first_chunk, 2 + before);
        EXPECT_EQ(part.index, before);
        EXPECT_EQ(part.pieces, 624);
        before += part.chunks;
    }
    EXPECT_EQ(before, 624);
    EXPECT_EQ(parts.at(0).chunks, 2);
    EXPECT_EQ(parts.at(3).first_chunk, 626);
    EXPECT_EQ(make_host_tables({0, 32768}, 32, kH200).joins.at(0).parts, 4);
    EXPECT_EQ(make_host_tables({0, 32768}, 64, kH200).joins.at(0).parts, 2);
    EXPECT_TRUE(make_host_tables({0, 16384, 32768, 49152}, 64, kH200).joins.empty());
}

TEST(HostTables, RunsAreBalancedAndCheckpointsFew) {
    for (const std::int64_t heads : {6, 8, 16, 20, 32, 33, 48, 64}) {
        for (const std::int64_t tokens : {8192, 32768, 131072}) {
            for (const bool packed : {false, true}) {
                SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(tokens));
                const HostTables tables =
                    packed
                        ? make_host_tables({0, 700, tokens / 3, tokens / 2, tokens}, heads, kH200)
                        : make_host_tables({0, tokens}, heads, kH200);
                const auto [steps, share] = steps_and_share(tables, heads);
                EXPECT_LE(static_cast<double>(steps), 1.15 * static_cast<double>(share) + 6);
                const std::int64_t bytes = tables.num_checkpoints * 4 * cuda::kCheckpointFloats;
                EXPECT_LE(bytes, 128 * tokens);
            }
        }
    }
    // Those of which forward keeps a part, too.
    const HostTables part = make_host_tables({0, 32768}, 32, kH200, 256, 0.42);
    const auto [part_steps, part_share] = steps_and_share(part, 32);
    EXPECT_LE(static_cast<double>(part_steps), 1.08 * static_cast<double>(part_share));
    EXPECT_EQ(make_host_tables({0, 32768}, 32, kH200).num_checkpoints, 1);
    EXPECT_EQ(make_host_tables({0, 32768}, 8, kH200).num_checkpoints, 7);
    EXPECT_EQ(make_host_tables({0, 8192}, 32, kH200).num_checkpoints, 1);
    // Many segments, and none.
    std::vector<std::int64_t> offsets = {0, 65536};
    for (int i = 0; i < 1000; ++i) {
        offsets.push_back(offsets.back() + 200);
    }
    const HostTables many = make_host_tables(offsets, 32, kH200);
    const auto [steps, share] = steps_and_share(many, 32);
    EXPECT_LE(steps, 2 * share);  // what precedes the many short ones
    EXPECT_TRUE(make_host_tables({0, 0}, 32, kH200).runs.empty());
}

}  // namespace
}  // namespace hybridcp::gdn
