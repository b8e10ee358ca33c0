// The order of work of a backward pass that has fewer segments and key heads ("tasks") than
// threads. Each task's chunks are cut into windows. Walks carry the gradient of the state through a
// window, the last window first; the blocks of a window need its walk alone. Threads take jobs in
// one order and wait only for jobs before theirs, which may be on another thread: no barrier holds
// up all of them where one has no core.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "kernels/simd/isa.h"

namespace hybridcp::gdn {

struct WindowJobs {
    std::int64_t tasks;
    std::int64_t windows;  // of a task
    std::int64_t parts;    // of a walk, by columns
    std::int64_t blocks;   // of a window

    /// What the walk of a window leaves is overwritten by that of the window so many before it.
    static constexpr std::int64_t kWindowsKept = 3;

    /// walk(task, window, part), block(task, window, block); which must not throw.
    template <typename Walk, typename Block>
    void run(Walk walk, Block block) const {
        Progress walked(tasks * windows), finished(tasks * windows);
        std::atomic<std::int64_t> next = 0;
        const std::int64_t walks_of_round = tasks * parts, blocks_of_round = tasks * blocks;
        const std::int64_t of_round = walks_of_round + blocks_of_round;
        const auto run_job = [&](std::int64_t job) {
            // A round: the walks of one window, then the blocks of the window behind it.
            const std::int64_t window = windows - 1 - job / of_round, index = job % of_round;
            if (index < walks_of_round) {
                const std::int64_t task = index / parts;
                if (window >= 0) {
                    await(walked, task, window + 1, parts);
                    await(finished, task, window + kWindowsKept, blocks);
                    walk(task, window, index % parts);
                    ++walked[at(task, window)];
                }
            } else if (window + 1 < windows) {
                const std::int64_t task = (index - walks_of_round) / blocks;
                await(walked, task, window + 1, parts);
                block(task, window + 1, (index - walks_of_round) % blocks);
                ++finished[at(task, window + 1)];
            }
        };
        parallel_tasks(max_threads(), [&](std::int64_t, int) {
            for (std::int64_t job = next++; job < (windows + 1) * of_round; job = next++) {
                run_job(job);
            }
        });
    }

  private:
    using Progress = std::vector<std::atomic<std::int64_t>>;

    [[nodiscard]] std::size_t at(std::int64_t task, std::int64_t window) const {
        return static_cast<std::size_t>(task * windows + window);
    }
    void await(const Progress& progress,
               std::int64_t task,
               std::int64_t window,
               std::int64_t count) const {
        while (window < windows && progress[at(task, window)] < count) {
            std::this_thread::yield();
        }
    }
};

}  // namespace hybridcp::gdn
