// Ranks as processes that are killed or stopped in the middle of a collective.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "comm/launch_environment.h"

extern char** environ;

namespace hybridcp {
namespace {

using Clock = std::chrono::steady_clock;

struct JobOptions {
    int num_ranks = 1;
    int num_rounds = 1000000000;
    bool rank_0_hosts = false;  // the store; else this process does
};

class Job {
  public:
    explicit Job(const JobOptions& options) {
        int port = 0;
        store_ = host_store(port);
        if (options.rank_0_hosts) {
            store_.reset();  // its port is free now
        }
        folder_ = std::filesystem::temp_directory_path() /
                  ("hcp_process_test_" + std::to_string(getpid()) + "_" + std::to_string(port));
        std::filesystem::create_directories(folder_);
        for (int rank = 0; rank < options.num_ranks; ++rank) {
            spawn(rank, {HCP_RANK_PROCESS, std::to_string(options.num_rounds), "5"},
                  {"RANK=" + std::to_string(rank), "LOCAL_RANK=" + std::to_string(rank),
                   "WORLD_SIZE=" + std::to_string(options.num_ranks), "MASTER_ADDR=127.0.0.1",
                   "MASTER_PORT=" + std::to_string(port),
                   std::string("TORCHELASTIC_USE_AGENT_STORE=") +
                       (options.rank_0_hosts ? "False" : "True")});
        }
    }

    ~Job() {
        for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
            if (statuses_[rank] == kRunning) {
                kill(processes_[rank], SIGKILL);
                waitpid(processes_[rank], nullptr, 0);
            }
        }
        std::filesystem::remove_all(folder_);
    }

    void signal(int rank, int number) { kill(processes_[static_cast<std::size_t>(rank)], number); }

    [[nodiscard]] std::string output(int rank) const {
        std::ifstream file(file_of(rank));
        std::ostringstream text;
        text << file.rdbuf();
        return text.str();
    }

    /// True when every rank has got through its first round.
    [[nodiscard]] bool wait_until_ready() {
        return poll(std::chrono::seconds(60), [&] {
            for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
                if (output(static_cast<int>(rank)).find("ready") == std::string::npos) {
                    return false;
                }
            }
            return true;
        });
    }

    /// Exit status of a rank, -signal when one killed it, kRunning when it still runs after
    /// `limit`.
    int wait_for_exit(int rank, std::chrono::milliseconds limit) {
        const auto i = static_cast<std::size_t>(rank);
        (void)poll(limit, [&] {
            int status = 0;
            if (waitpid(processes_[i], &status, WNOHANG) == processes_[i]) {
                statuses_[i] = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
            }
            return statuses_[i] != kRunning;
        });
        return statuses_[i];
    }

    static constexpr int kRunning = -1000;

  private:
    [[nodiscard]] std::filesystem::path file_of(int rank) const {
        return folder_ / std::to_string(rank);
    }

    static bool poll(std::chrono::milliseconds limit, const std::function<bool()>& done) {
        for (const Clock::time_point end = Clock::now() + limit; Clock::now() < end;) {
            if (done()) {
                return true;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        return done();
    }

    void spawn(int rank, std::vector<std::string> arguments, std::vector<std::string> variables) {
        for (char** variable = environ; *variable != nullptr; ++variable) {
            variables.emplace_back(*variable);
        }
        const auto pointers = [](std::vector<std::string>& strings) {
            std::vector<char*> all;
            for (std::string& string : strings) {
                all.push_back(string.data());
            }
            all.push_back(nullptr);
            return all;
        };
        posix_spawn_file_actions_t actions;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, file_of(rank).c_str(),
                                         O_WRONLY | O_CREAT | O_TRUNC, 0600);
        posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
        pid_t process = 0;
        const int error = posix_spawn(&process, HCP_RANK_PROCESS, &actions, nullptr,
                                      pointers(arguments).data(), pointers(variables).data());
        posix_spawn_file_actions_destroy(&actions);
        ASSERT_EQ(error, 0) << "cannot start " << HCP_RANK_PROCESS;
        processes_.push_back(process);
        statuses_.push_back(kRunning);
    }

    c10::intrusive_ptr<c10d::Store> store_;
    std::filesystem::path folder_;
    std::vector<pid_t> processes_;
    std::vector<int> statuses_;
};

// The message is one line on standard output, and nothing is on standard error.
void expect_failure(Job& job, const std::vector<int>& ranks, const std::string& part) {
    for (const int rank : ranks) {
        EXPECT_EQ(job.wait_for_exit(rank, std::chrono::seconds(30)), 3) << "rank " << rank;
        const std::string text = job.output(rank);
        EXPECT_TRUE(text.starts_with("ready\ngradients at step ")) << text;
        EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2) << text;
        EXPECT_NE(text.find(part), std::string::npos) << text;
    }
}

TEST(Processes, EndWellTogether) {
    Job job({.num_ranks = 3, .num_rounds = 5});
    for (int rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(job.wait_for_exit(rank, std::chrono::seconds(60)), 0) << job.output(rank);
        EXPECT_EQ(job.output(rank), "ready\n");
    }
}

// All at once, because every case mostly waits.
TEST(Processes, TheOthersEndAndNameTheRankThatIsGone) {
    Job killed({.num_ranks = 4});
    Job stopped({.num_ranks = 3});
    // The store goes with rank 0: nobody can ask who is silent, but everybody ends.
    Job host_killed({.num_ranks = 3, .rank_0_hosts = true});
    Job host_stopped({.num_ranks = 3, .rank_0_hosts = true});
    for (Job* job : {&killed, &stopped, &host_killed, &host_stopped}) {
        ASSERT_TRUE(job->wait_until_ready());
    }
    killed.signal(2, SIGKILL);
    stopped.signal(1, SIGSTOP);
    host_killed.signal(0, SIGKILL);
    host_stopped.signal(0, SIGSTOP);
    expect_failure(killed, {0, 1, 3}, "; rank 2 no longer answers\n");
    EXPECT_EQ(killed.wait_for_exit(2, std::chrono::seconds(5)), -SIGKILL);
    expect_failure(stopped, {0, 2}, "; rank 1 no longer answers\n");
    expect_failure(host_killed, {1, 2}, " among the 3 ranks of group 'world': ");
    expect_failure(host_stopped, {1, 2}, " among the 3 ranks of group 'world': ");
}

}  // namespace
}  // namespace hybridcp
