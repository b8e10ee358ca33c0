#include "hybridcp/group.h"

#include <gtest/gtest.h>

#include "rank_threads.h"

namespace hybridcp {
namespace {

using testing::run_ranks;

class GroupOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GroupOf, ::testing::Values(1, 2, 3, 4, 5, 8));

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kLong, at::kByte, at::kDouble};

// Row i of what rank `from` sends to rank `to`; below 128, so that every dtype holds it.
std::int64_t value(int from, int to, std::int64_t i) {
    return (from * 29 + to * 11 + i * 3) % 127;
}

TEST_P(GroupOf, AllToAllMovesUnevenRowsOfEveryDtype) {
    const int num_ranks = GetParam();
    const auto count = [](int from, int to) { return std::int64_t{(from * 2 + to * 3) % 4}; };
    run_ranks(num_ranks, [&](Group& group) {
        const int me = group.rank();
        for (const at::ScalarType dtype : kDtypes) {
            std::vector<std::int64_t> send_rows;
            std::vector<std::int64_t> receive_rows;
            std::vector<std::int64_t> sent;
            std::vector<std::int64_t> expected;
            for (int peer = 0; peer < num_ranks; ++peer) {
                send_rows.push_back(count(me, peer));
                receive_rows.push_back(count(peer, me));
                for (std::int64_t i = 0; i < count(me, peer); ++i) {
                    sent.push_back(value(me, peer, i));
                }
                for (std::int64_t i = 0; i < count(peer, me); ++i) {
                    expected.push_back(value(peer, me, i));
                }
            }
            const auto as_rows = [&](const std::vector<std::int64_t>& values) {
                return at::tensor(values, at::kLong).to(dtype).view({-1, 1, 1}).expand({-1, 3, 2});
            };
            const at::Tensor received =
                group.all_to_all("rows", as_rows(sent), send_rows, receive_rows);
            EXPECT_TRUE(at::equal(received, as_rows(expected))) << dtype << received << expected;
        }
    });
}

}  // namespace
}  // namespace hybridcp
