// Runs a test on several ranks that are threads of this process, over Gloo. A thread per rank is
// enough for autograd too: on the CPU the backward pass runs on the thread that asks for it.
#pragma once

#include <gtest/gtest.h>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "hybridcp/error.h"
#include "hybridcp/group.h"

namespace hybridcp::testing {

/// libtorch's flight recorder keeps one map for all groups of a process and writes to it without a
/// lock (a crash now and then when ranks are threads), so it is off before any group exists.
inline const int kFlightRecorderIsOff = ::setenv("TORCH_FR_BUFFER_SIZE", "0", 0);

/// What the ranks threw. A CommError is mostly the echo of another rank's failure, so it is told
/// last.
class RankFailures {
  public:
    void add(const std::exception_ptr& failure) {
        const std::lock_guard lock(mutex_);
        try {
            std::rethrow_exception(failure);
        } catch (const CommError&) {
            first_echo_ = first_echo_ ? first_echo_ : failure;
        } catch (...) {
            first_ = first_ ? first_ : failure;
        }
    }
    [[nodiscard]] bool any() const { return first_ != nullptr || first_echo_ != nullptr; }
    void rethrow() const {
        if (any()) {
            std::rethrow_exception(first_ ? first_ : first_echo_);
        }
    }

  private:
    std::mutex mutex_;
    std::exception_ptr first_;
    std::exception_ptr first_echo_;
};

/// Calls body(group) on `num_ranks` threads, each with its own Group "world" over one store. A rank
/// that throws leaves its group, which ends the waits of the others; what it threw comes out here.
/// EXPECT_* may be used in the body, and their messages name the rank; ASSERT_* would leave the
/// body of one rank only.
inline void run_ranks(int num_ranks,
                      const std::function<void(Group&)>& body,
                      std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    RankFailures failures;
    // A rank that is done keeps its group until all are: its last messages may still be on their
    // way.
    std::vector<std::shared_ptr<Group>> groups(static_cast<std::size_t>(num_ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) {
        threads.emplace_back([&, rank] {
            const ::testing::ScopedTrace trace(__FILE__, __LINE__, "rank " + std::to_string(rank));
            at::set_num_threads(1);
            auto& group = groups[static_cast<std::size_t>(rank)];
            try {
                group = Group::make(store, {.rank = rank, .size = num_ranks, .timeout = timeout});
                body(*group);
            } catch (...) {
                failures.add(std::current_exception());
                group.reset();
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    groups.clear();
    failures.rethrow();
}

}  // namespace hybridcp::testing
