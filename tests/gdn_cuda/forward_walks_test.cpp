// Which chunks the pieces of the forward and state gradient kernels walk (walk_range.cuh).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "gdn_cuda/operands.h"
#include "gdn_cuda/support.h"
#include "kernels/gdn/cuda/pieces.cuh"

namespace hybridcp::test {
namespace {

using namespace gdn::cuda;  // NOLINT(google-build-using-namespace)
using at::Tensor;

// The walk of each piece of one segment and head, by a block that does nothing else.
std::vector<Walk> walks(const GateInputs& gates, const Tables& tables, bool may_truncate) {
    constexpr std::uint32_t kWarps = 16;
    std::vector<Walk> result;
    Shape shape{};
    shape.key_heads = shape.value_heads = 1;
    for (const Piece& piece : tables.pieces) {
        Walk walk{};
        simt::launch({.threads = 32 * kWarps, .shared_bytes = 4 * kWarps * kChunksOfWarp}, [&] {
            const Walk segment = begin_walk(piece, shape, tables.chunks.data(), 0);
            const WalkOrder order = {tables.chunks.data(), piece.first_chunk, piece.chunks, false};
            walk = walk_piece(piece, segment, order, gates, may_truncate, device::shared_base());
        });
        result.push_back(walk);
    }
    return result;
}

GateInputs one_head(const Tensor& g) {
    GateInputs gates{};
    gates.g = g.const_data_ptr<float>();
    gates.beta = gates.g;
    gates.g_token_stride = gates.beta_token_stride = 1;
    return gates;
}

TEST(ForwardWalks, ReachAsFarAsTheGates) {
    struct Case {
        float g;
        int begin, main, end;  // of the second piece
    };
    const Tables tables = make_tables({0, 200 * 64 - 7}, 2);
    // -18 is passed after 3, 80 and more than all chunks; NaN is never forgotten. An even cut moves
    // by three eighths of what is walked before it.
    for (const Case& expected : {Case{-0.1F, 98, 101, 200}, Case{-18.1F / 5120, 50, 130, 200},
                                 Case{-17.9F / 6400, 0, 160, 200}, Case{0.0F, 0, 160, 200},
                                 Case{std::numeric_limits<float>::quiet_NaN(), 0, 160, 200}}) {
        const Tensor g = at::full({200 * 64, 1}, expected.g, at::kFloat);
        const GateInputs gates = one_head(g);
        const std::vector<Walk> both = walks(gates, tables, true);
        EXPECT_EQ(both[0].begin, 0);
        EXPECT_EQ(both[0].main, 0);
        EXPECT_EQ(both[0].end, expected.main) << expected.g;
        EXPECT_EQ(both[1].begin, expected.begin) << expected.g;
        EXPECT_EQ(both[1].main, expected.main);
        EXPECT_EQ(both[1].end, expected.end);
        EXPECT_EQ(both[1].from_start, expected.begin == 0);
        EXPECT_TRUE(both[1].to_end && !both[0].to_end);
    }
}

TEST(ForwardWalks, PiecesPartAnySegment) {
    const Tensor g = at::zeros({40 * 64, 1}, at::kFloat);
    const GateInputs gates = one_head(g);
    for (const int chunks : {1, 2, 3, 7, 40}) {
        for (const int pieces : {1, 2, 3, 4}) {
            for (const bool may_truncate : {false, true}) {
                const Tables tables = make_tables({0, chunks * 64}, pieces);
                int next = 0, ends = 0;
                for (const Walk& walk : walks(gates, tables, may_truncate)) {
                    EXPECT_EQ(walk.main, next);
                    EXPECT_LE(walk.begin, walk.main);
                    next = walk.end;
                    ends += walk.to_end ? 1 : 0;
                }
                EXPECT_EQ(next, chunks);
                EXPECT_EQ(ends, 1) << chunks << " chunks, " << pieces << " pieces";
            }
        }
    }
}

}  // namespace
}  // namespace hybridcp::test
