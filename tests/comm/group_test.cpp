#include "hybridcp/group.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>

#include "hybridcp/error.h"
#include "rank_threads.h"

namespace hybridcp {
namespace {

using testing::run_ranks;
using Clock = std::chrono::steady_clock;

class GroupOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GroupOf, ::testing::Values(1, 2, 3, 4, 5, 8));

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kLong, at::kByte, at::kDouble};

// Element i of the k-th message from one rank to another; below 127, so that every dtype holds it.
at::Tensor message(int from, int to, std::int64_t k, std::int64_t numel, at::ScalarType dtype) {
    return ((at::arange(numel) * 3 + from * 29 + to * 11 + k * 7) % 127).to(dtype);
}

template <typename Error, typename Call>
std::string message_of(Call call) {
    try {
        call();
    } catch (const Error& error) {
        return error.what();
    }
    ADD_FAILURE() << "nothing was thrown";
    return "";
}

double seconds_of(const std::function<void()>& call) {
    const Clock::time_point start = Clock::now();
    call();
    return std::chrono::duration<double>(Clock::now() - start).count();
}

void expect_contains(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

TEST_P(GroupOf, MessagesOfAPairArriveInOrder) {
    const int num_ranks = GetParam();
    // 40,000 elements do not fit into a socket's buffer: posting must not wait for the other side.
    const std::vector<std::int64_t> sizes{1, 40000, 7, 63};
    run_ranks(num_ranks, [&](Group& group) {
        std::vector<Pending> pending;
        for (int peer = 0; peer < num_ranks; ++peer) {
            for (std::size_t k = 0; k < sizes.size() && peer != group.rank(); ++k) {
                const auto i = static_cast<std::int64_t>(k);
                const at::Tensor tensor = message(group.rank(), peer, i, sizes[k], kDtypes[k]);
                pending.push_back(group.send("send", tensor, peer));  // keeps the tensor alive
            }
        }
        for (int peer = num_ranks - 1; peer >= 0; --peer) {
            for (std::size_t k = 0; k < sizes.size() && peer != group.rank(); ++k) {
                const at::Tensor expected =
                    message(peer, group.rank(), static_cast<std::int64_t>(k), sizes[k], kDtypes[k]);
                const at::Tensor into = at::empty_like(expected);
                group.receive("receive", into, peer).wait();
                EXPECT_TRUE(at::equal(into, expected)) << "from " << peer << ", message " << k;
            }
        }
        for (Pending& send : pending) {
            send.wait();
        }
    });
}

TEST_P(GroupOf, ReceivesMayBePostedLongBeforeTheSends) {
    const int num_ranks = GetParam();
    run_ranks(num_ranks, [&](Group& group) {  // a chain, as the state exchange is
        const int me = group.rank();
        at::Tensor state = at::zeros({5, 3});
        if (me > 0) {
            group.receive("state", state, me - 1).wait();
        }
        state = state + 1;
        if (me + 1 < num_ranks) {
            group.send("state", state, me + 1).wait();
        }
        EXPECT_TRUE(at::equal(state, at::full({5, 3}, me + 1)));
    });
}

TEST_P(GroupOf, ExchangeSwapsSeveralMessagesWithEveryPeer) {
    const int num_ranks = GetParam();
    const std::vector<std::int64_t> sizes{3, 40000, 1};
    run_ranks(num_ranks, [&](Group& group) {
        const int me = group.rank();
        std::vector<Message> sends, receives;
        std::vector<at::Tensor> expected;
        std::int64_t bytes = 0;
        for (int peer = 0; peer < num_ranks; ++peer) {
            for (std::size_t k = 0; k < sizes.size() && peer != me; ++k) {
                const auto i = static_cast<std::int64_t>(k);
                sends.push_back({message(me, peer, i, sizes[k], kDtypes[k]), peer});
                expected.push_back(message(peer, me, i, sizes[k], kDtypes[k]));
                receives.push_back({at::empty_like(expected.back()), peer});
                bytes += static_cast<std::int64_t>(expected.back().nbytes());
            }
        }
        std::vector<Pending> pending = group.exchange("swap", sends, receives);
        EXPECT_EQ(pending.size(), sends.size() + receives.size());
        for (std::size_t i = 0; i < pending.size(); ++i) {
            pending[i].wait();  // the receives come first
            if (i < receives.size()) {
                EXPECT_TRUE(at::equal(receives[i].tensor, expected[i])) << "message " << i;
            }
        }
        EXPECT_EQ(group.recorder().of("swap").messages, static_cast<std::int64_t>(sends.size()));
        EXPECT_EQ(group.recorder().of("swap").bytes, bytes);
        EXPECT_TRUE(group.exchange("nothing", {}, {}).empty());
    });
}

TEST_P(GroupOf, ExchangeInOneDirectionMeetsOneInTheOther) {
    const int num_ranks = GetParam();
    run_ranks(num_ranks, [&](Group& group) {  // a chain: the ends only send or only receive
        const int me = group.rank();
        std::vector<Message> sends, receives;
        if (me > 0) {
            sends.push_back({at::full({4}, me, at::kFloat), me - 1});
        }
        if (me + 1 < num_ranks) {
            receives.push_back({at::empty({4}), me + 1});
        }
        for (Pending& pending : group.exchange("down", sends, receives)) {
            pending.wait();
        }
        for (const Message& received : receives) {
            EXPECT_TRUE(at::equal(received.tensor, at::full({4}, me + 1, at::kFloat)));
        }
    });
}

TEST_P(GroupOf, AllToAllMovesUnevenRowsOfEveryDtype) {
    const int num_ranks = GetParam();
    const auto uneven = [](int from, int to) { return std::int64_t{(from * 2 + to * 3) % 4}; };
    const auto one_pair = [&](int from, int to) {
        return std::int64_t{from == 0 && to == num_ranks - 1 ? 2 : 0};
    };
    const auto nothing = [](int, int) { return std::int64_t{0}; };
    for (const std::function<std::int64_t(int, int)>& count :
         {std::function<std::int64_t(int, int)>(uneven), {one_pair}, {nothing}}) {
        run_ranks(num_ranks, [&](Group& group) {
            const int me = group.rank();
            for (const at::ScalarType dtype : kDtypes) {
                std::vector<std::int64_t> send_rows, receive_rows;
                std::vector<at::Tensor> sent, expected;
                for (int peer = 0; peer < num_ranks; ++peer) {
                    send_rows.push_back(count(me, peer));
                    receive_rows.push_back(count(peer, me));
                    sent.push_back(message(me, peer, 0, send_rows.back() * 6, dtype));
                    expected.push_back(message(peer, me, 0, receive_rows.back() * 6, dtype));
                }
                const at::Tensor received = group.all_to_all("rows", at::cat(sent).view({-1, 3, 2}),
                                                             send_rows, receive_rows);
                EXPECT_TRUE(at::equal(received, at::cat(expected).view({-1, 3, 2}))) << dtype;
            }
        });
    }
}

TEST_P(GroupOf, AllGatherTakesEveryDtypeAndShape) {
    const int num_ranks = GetParam();
    run_ranks(num_ranks, [&](Group& group) {
        for (const at::ScalarType dtype : kDtypes) {
            const auto local = [&](int rank) {  // not contiguous
                return message(rank, 0, 0, 12, dtype).view({3, 4}).t();
            };
            const at::Tensor gathered = group.all_gather("gather", local(group.rank()));
            ASSERT_EQ(gathered.sizes(), (std::vector<std::int64_t>{num_ranks, 4, 3}));
            for (int rank = 0; rank < num_ranks; ++rank) {
                EXPECT_TRUE(at::equal(gathered[rank], local(rank))) << dtype << " of " << rank;
            }
        }
        EXPECT_EQ(group.all_gather("gather", at::zeros({0, 3})).sizes(),
                  (std::vector<std::int64_t>{num_ranks, 0, 3}));
        const at::Tensor scalars = group.all_gather("gather", at::scalar_tensor(group.rank()));
        EXPECT_TRUE(at::equal(scalars, at::arange(num_ranks).to(at::kFloat)));
    });
}

// Values of many magnitudes, so that another order of additions gives other bits.
at::Tensor summand(int rank, std::int64_t numel) {
    const at::Tensor i = at::arange(numel, at::kDouble) + 1000.0 * rank + 0.5;
    return (at::sin(i) * at::exp(8 * at::cos(i * 0.7))).to(at::kFloat);
}

TEST_P(GroupOf, AllReduceGivesTheSameBitsEverywhereAndEveryTime) {
    const int num_ranks = GetParam();
    for (const std::int64_t numel : {1, 3, 1001}) {
        run_ranks(num_ranks, [&](Group& group) {
            at::Tensor exact = at::zeros({numel}, at::kDouble);
            at::Tensor magnitude = at::zeros({numel}, at::kDouble);
            at::Tensor largest = summand(0, numel);
            for (int rank = 0; rank < num_ranks; ++rank) {
                exact += summand(rank, numel).to(at::kDouble);
                magnitude += summand(rank, numel).to(at::kDouble).abs();
                largest = at::maximum(largest, summand(rank, numel));
            }
            at::Tensor sum = summand(group.rank(), numel);
            group.all_reduce_sum("sum", sum);
            EXPECT_LE(((sum.to(at::kDouble) - exact).abs() / magnitude).max().item<double>(), 1e-6);
            const at::Tensor everywhere = group.all_gather("gather", sum);
            for (int repeat = 0; repeat < 3; ++repeat) {
                at::Tensor again = summand(group.rank(), numel);
                group.all_reduce_sum("sum", again);
                EXPECT_TRUE(at::equal(again, sum));
            }
            for (int rank = 0; rank < num_ranks; ++rank) {
                EXPECT_TRUE(at::equal(everywhere[rank], sum)) << "rank " << rank;
            }
            at::Tensor maximum = summand(group.rank(), numel);
            group.all_reduce_max("max", maximum);
            EXPECT_TRUE(at::equal(maximum, largest));
        });
    }
}

TEST_P(GroupOf, AllReduceTakesTheDtypesOfGradientsAndCounts) {
    const int num_ranks = GetParam();
    run_ranks(num_ranks, [&](Group& group) {
        for (const at::ScalarType dtype : {at::kBFloat16, at::kLong, at::kDouble}) {
            at::Tensor sum = at::full({5}, group.rank() + 1, dtype);
            group.all_reduce_sum("sum", sum);
            EXPECT_TRUE(at::equal(sum, at::full({5}, num_ranks * (num_ranks + 1) / 2, dtype)))
                << dtype;
        }
    });
}

TEST_P(GroupOf, BroadcastFromEveryRoot) {
    const int num_ranks = GetParam();
    run_ranks(num_ranks, [&](Group& group) {
        for (const at::ScalarType dtype : kDtypes) {
            for (int root = 0; root < num_ranks; ++root) {
                at::Tensor tensor = message(group.rank(), 0, 0, 65, dtype);
                group.broadcast("broadcast", tensor, root);
                EXPECT_TRUE(at::equal(tensor, message(root, 0, 0, 65, dtype))) << dtype << root;
            }
        }
    });
}

TEST_P(GroupOf, NobodyPassesTheBarrierBeforeEverybodyHasCome) {
    const int num_ranks = GetParam();
    std::atomic<int> arrived = 0;
    run_ranks(num_ranks, [&](Group& group) {
        for (int round = 1; round <= 3; ++round) {
            if (group.rank() == num_ranks - 1) {
                std::this_thread::sleep_for(std::chrono::milliseconds(30));
            }
            ++arrived;
            group.barrier("barrier");
            EXPECT_GE(arrived, round * num_ranks);
        }
    });
}

TEST_P(GroupOf, AgreementFailsOnEveryRankAndNamesTheOddOne) {
    const int num_ranks = GetParam();
    run_ranks(num_ranks, [&](Group& group) {
        group.agree(0xFFFF'FFFF'FFFF'FFF0ULL, "the layout");
        if (num_ranks == 1) {
            return;
        }
        const int odd = num_ranks - 1;
        const std::string text =
            message_of<UsageError>([&] { group.agree(group.rank() == odd ? 7 : 8, "the layout"); });
        expect_contains(text,
                        "do not agree on the layout: rank " + std::to_string(odd) + " differs");
        group.agree(3, "the group still works");
    });
}

TEST_P(GroupOf, RecorderCountsWhatThisRankSends) {
    const int num_ranks = GetParam();
    const std::int64_t others = num_ranks - 1;
    run_ranks(num_ranks, [&](Group& group) {
        const int me = group.rank();
        const at::Tensor five = at::zeros({5});  // 20 bytes
        std::vector<Pending> sends;
        at::Tensor into = at::empty({5});
        for (int peer = 0; peer < num_ranks; ++peer) {
            if (peer != me) {
                sends.push_back(group.send("p2p", five, peer));
            }
        }
        for (int peer = 0; peer < num_ranks; ++peer) {
            if (peer != me) {
                group.receive("p2p", into, peer).wait();
            }
        }
        for (Pending& send : sends) {
            send.wait();
        }
        (void)group.all_gather("gather", five);
        at::Tensor sum = at::zeros({7 * num_ranks});
        group.all_reduce_sum("sum", sum);
        group.broadcast("broadcast", into, 0);
        std::vector<std::int64_t> rows(static_cast<std::size_t>(num_ranks), 2);
        rows[0] = 0;  // nobody sends to rank 0, and it receives nothing, but it sends
        std::vector<std::int64_t> received(rows.size(), me == 0 ? 0 : 2);
        const std::int64_t stay = rows[static_cast<std::size_t>(me)];
        (void)group.all_to_all("rows", at::zeros({2 * others, 3}, at::kBFloat16), rows, received);

        const auto expect = [&](const std::string& op, std::int64_t messages, std::int64_t bytes) {
            EXPECT_EQ(group.recorder().of(op).messages, messages) << op;
            EXPECT_EQ(group.recorder().of(op).bytes, bytes) << op;
        };
        const std::int64_t one = num_ranks > 1 ? 1 : 0;  // a group of one moves nothing
        expect("p2p", others, others * 20);
        expect("gather", one, others * 20);
        expect("sum", one, 2 * others * 7 * 4);
        expect("broadcast", one, me == 0 ? others * 20 : 0);
        expect("rows", one, (2 * others - stay) * 6);
        EXPECT_EQ(group.recorder().of("gather").seconds > 0.0, num_ranks > 1);
        EXPECT_EQ(group.recorder().traffic().size(), num_ranks > 1 ? 5U : 0U);
        group.recorder().reset();
        expect("rows", 0, 0);
    });
}

TEST(GroupFailure, TimeoutNamesOpStepPeerAndBytes) {
    run_ranks(
        3,
        [](Group& group) {
            group.set_step(7);
            at::Tensor into = at::empty({3});
            std::string text;
            const double seconds = seconds_of([&] {
                if (group.rank() == 0) {  // rank 2 never sends
                    text = message_of<CommError>([&] { group.receive("halo", into, 2).wait(); });
                }
            });
            if (group.rank() == 0) {
                expect_contains(text,
                                "halo at step 7: rank 0 waited 1.0 s for 12 bytes from rank 2: ");
                EXPECT_GE(seconds, 0.9);
                EXPECT_LT(seconds, 3.0);
                EXPECT_EQ(text.find('\n'), std::string::npos);
                EXPECT_GE(group.recorder().of("halo").seconds, 0.9);
            }
        },
        std::chrono::seconds(1));
}

TEST(GroupFailure, CollectiveWithoutOneRankTimesOutOnTheOthers) {
    run_ranks(
        4,
        [](Group& group) {
            if (group.rank() == 3) {
                std::this_thread::sleep_for(std::chrono::seconds(3));
                return;
            }
            std::string text;
            const double seconds = seconds_of([&] {
                text =
                    message_of<CommError>([&] { (void)group.all_gather("keys", at::zeros({2})); });
            });
            expect_contains(text, "keys: rank " + std::to_string(group.rank()) + " waited ");
            expect_contains(text, " for 24 bytes among the 4 ranks of group 'world': ");
            EXPECT_LT(seconds, 3.0);
        },
        std::chrono::seconds(1));
}

TEST(GroupFailure, ARankThatThrowsEndsTheWaitsOfTheOthers) {
    std::atomic<int> ended = 0;
    const double seconds = seconds_of([&] {
        const std::string text = message_of<NumericsError>([&] {
            run_ranks(4, [&](Group& group) {
                if (group.rank() == 1) {
                    throw NumericsError("the loss is not finite");
                }
                try {
                    at::Tensor into = at::zeros({4});
                    if (group.rank() == 0) {
                        group.receive("state", into, 1).wait();
                    } else {
                        group.all_reduce_sum("sum", into);
                    }
                } catch (const CommError&) {
                    ++ended;
                    throw;
                }
            });
        });
        EXPECT_EQ(text, "the loss is not finite");
    });
    EXPECT_EQ(ended, 3);
    EXPECT_LT(seconds, 10.0);
}

TEST(GroupFailure, ARankThatNeverComesIsAnErrorNotAHang) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::string text;
    const double seconds = seconds_of([&] {
        text = message_of<CommError>([&] {
            (void)Group::make(store, {.rank = 0, .size = 2, .timeout = std::chrono::seconds(1)});
        });
    });
    expect_contains(text, "connecting group 'world': rank 0 waited");
    EXPECT_LT(seconds, 5.0);
}

TEST(Group, SubgroupsShareAStoreAndNameGlobalRanks) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    run_ranks(4, [&](Group& world) {
        const int axis = world.rank() / 2;
        const auto group = Group::make(store, {.rank = world.rank() % 2,
                                               .size = 2,
                                               .name = "cp" + std::to_string(axis),
                                               .global_ranks = {2 * axis, 2 * axis + 1}});
        at::Tensor sum = at::full({1}, world.rank(), at::kLong);
        group->all_reduce_sum("sum", sum);
        EXPECT_EQ(sum.item<std::int64_t>(), 4 * axis + 1);
        const std::string text = message_of<UsageError>(
            [&] { group->agree(static_cast<std::uint64_t>(world.rank()), "the recipe"); });
        expect_contains(text, "rank " + std::to_string(2 * axis + 1) + " differs");
        expect_contains(text, "in group 'cp" + std::to_string(axis) + "'");
        world.barrier("barrier");
    });
}

TEST(Group, RefusesWhatCannotWork) {
    const auto make = [](GroupOptions options) { (void)Group::make(nullptr, std::move(options)); };
    expect_contains(message_of<UsageError>([&] { make({.device = "tpu"}); }), "use cpu or cuda");
#ifndef HCP_CUDA
    expect_contains(message_of<UsageError>([&] { make({.device = "cuda"}); }),
                    "configure with HCP_CUDA=ON, or device: cpu");
#endif
    EXPECT_THROW(make({.rank = 2, .size = 2}), UsageError);
    EXPECT_THROW(make({.size = 2}), UsageError);  // no store
    EXPECT_THROW(make({.size = 1, .global_ranks = {0, 1}}), UsageError);
    run_ranks(2, [](Group& group) {
        const int peer = 1 - group.rank();
        const at::Tensor rows = at::zeros({3, 2});
        EXPECT_THROW((void)group.send("op", at::zeros({0, 4}), peer), UsageError);
        EXPECT_THROW((void)group.send("op", rows.t(), peer), UsageError);
        EXPECT_THROW((void)group.send("op", rows, group.rank()), UsageError);
        EXPECT_THROW((void)group.receive("op", at::zeros({0}), peer), UsageError);
        EXPECT_THROW((void)group.exchange("op", {{rows, peer}}, {{at::zeros({0}), peer}}),
                     UsageError);
        EXPECT_EQ(group.recorder().of("op").messages, 0);
        EXPECT_THROW((void)group.all_to_all("op", rows, {1, 1}, {1, 1}), UsageError);
        EXPECT_THROW((void)group.all_to_all("op", rows, {3}, {3}), UsageError);
        EXPECT_THROW((void)group.all_to_all("op", rows, {1, 2}, {2, 1}), UsageError);
        EXPECT_THROW((void)group.all_to_all("op", rows, {4, -1}, {4, -1}), UsageError);
        at::Tensor transposed = rows.t();
        EXPECT_THROW(group.all_reduce_sum("op", transposed), UsageError);
        EXPECT_THROW(Pending().wait(), UsageError);
        group.barrier("after the refusals");  // none of them was posted
    });
}

}  // namespace
}  // namespace hybridcp
