// An error of one rank is the same error on all of them; texts reach every rank.
#include "train/shared_work.h"

#include <gtest/gtest.h>

#include "hybridcp/error.h"
#include "mesh_threads.h"

namespace hybridcp {
namespace {

using testing::message_of;
using testing::run_mesh;

class SharedWork : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SharedWork, ::testing::Values(1, 2, 3, 5));

TEST_P(SharedWork, EveryRankHasTheErrorOfTheLowestThatFailed) {
    run_mesh(1, GetParam(), [](const Mesh& mesh) {
        const int rank = mesh.world->rank();
        const int num_ranks = mesh.world->size();
        for (int first = 0; first < num_ranks; ++first) {
            const auto work = [&] {
                if (rank >= first) {
                    throw FormatError(fmt::format("{} of {}", rank, num_ranks));
                }
            };
            EXPECT_THROW(on_every_rank(mesh, "work", work), FormatError);
            EXPECT_EQ(message_of([&] { on_every_rank(mesh, "work", work); }),
                      fmt::format("{} of {}", first, num_ranks));
        }
        on_every_rank(mesh, "work", [] {});
        const auto only_first = [&] {
            EXPECT_EQ(rank, 0);
            throw UsageError("");
        };
        EXPECT_THROW(on_rank_zero(mesh, "work", only_first), UsageError);
    });
}

TEST_P(SharedWork, TextsReachEveryRank) {
    run_mesh(1, GetParam(), [](const Mesh& mesh) {
        for (const std::size_t length : {std::size_t{0}, std::size_t{1}, std::size_t{1000}}) {
            const auto text_of = [&](std::size_t rank) {
                return std::string(length * rank, static_cast<char>('a' + rank));
            };
            const auto rank = static_cast<std::size_t>(mesh.world->rank());
            const auto texts = gather_text(mesh, "text", text_of(rank));
            EXPECT_EQ(texts.size(), static_cast<std::size_t>(mesh.world->size()));
            for (std::size_t other = 0; other < texts.size(); ++other) {
                EXPECT_EQ(texts[other], text_of(other));
            }
        }
    });
}

}  // namespace
}  // namespace hybridcp
