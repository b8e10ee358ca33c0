#include "hcp/launcher.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "comm/launch_environment.h"
#include "hybridcp/error.h"

namespace hybridcp::cli {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPollInterval = std::chrono::milliseconds(200);
constexpr auto kAnnounceAfter =
    std::chrono::seconds(1);  // ranks that fail alike end together, without a word

std::string reason(int error) {
    return std::strerror(error);
}

int num_usable_cores() {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

/// The environment of one rank: ours, and torchrun's variables.
std::vector<std::string> rank_environment(int rank, int num_ranks, int port) {
    std::vector<std::string> own = {
        fmt::format("RANK={}", rank),
        fmt::format("WORLD_SIZE={}", num_ranks),
        fmt::format("LOCAL_RANK={}", rank),
        fmt::format("LOCAL_WORLD_SIZE={}", num_ranks),
        "MASTER_ADDR=127.0.0.1",
        fmt::format("MASTER_PORT={}", port),
        "TORCHELASTIC_USE_AGENT_STORE=True",
    };
    if (std::getenv("OMP_NUM_THREADS") == nullptr) {
        own.push_back(
            fmt::format("OMP_NUM_THREADS={}", std::max(1, num_usable_cores() / num_ranks)));
    }
    std::vector<std::string> all = own;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        const std::string variable(*entry);
        const std::string name = variable.substr(0, variable.find('=') + 1);
        const bool replaced = std::any_of(own.begin(), own.end(), [&](const std::string& other) {
            return other.compare(0, name.size(), name) == 0;
        });
        if (!replaced) {
            all.push_back(variable);
        }
    }
    return all;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
    std::vector<char*> list;
    for (std::string& text : strings) {
        list.push_back(text.data());
    }
    list.push_back(nullptr);
    return list;
}

std::string describe(int status) {
    if (WIFSIGNALED(status)) {
        const int number = WTERMSIG(status);
        return fmt::format("was killed by signal {} ({})", number, strsignal(number));
    }
    return fmt::format("ended with status {}", WEXITSTATUS(status));
}

class LocalRanks {
  public:
    explicit LocalRanks(LaunchOptions options) : options_(std::move(options)) {
        sigemptyset(&signals_);
        for (const int number : {SIGCHLD, SIGINT, SIGTERM}) {
            sigaddset(&signals_, number);
        }
        // Blocked before any thread of the store exists, so that only the loop below takes them.
        pthread_sigmask(SIG_BLOCK, &signals_, &original_mask_);
    }
    ~LocalRanks() { kill_all(SIGKILL); }
    LocalRanks(const LocalRanks&) = delete;
    LocalRanks& operator=(const LocalRanks&) = delete;

    void start() {
        int port = 0;
        store_ = host_store(port);
        for (int rank = 0; rank < options_.num_ranks; ++rank) {
            start_rank(rank, port);
        }
    }

    int wait() {
        while (num_running() > 0) {
            take_signal();
            reap();
            end_survivors();
        }
        if (num_stop_requests_ > 0 && status() != 0) {
            fmt::print(stderr, "hcp: stopped\n");
        }
        return status();
    }

  private:
    struct Rank {
        pid_t pid = -1;
        bool running = true;
        int status = 0;  // as waitpid gives it
    };

    void start_rank(int rank, int port) {
        std::vector<std::string> environment = rank_environment(rank, options_.num_ranks, port);
        std::vector<std::string> arguments = options_.arguments;
        const std::vector<char*> environment_list = pointers(environment);
        const std::vector<char*> argument_list = pointers(arguments);
        const pid_t launcher = getpid();
        const pid_t pid = fork();
        if (pid < 0) {
            throw CommError(fmt::format("cannot start rank {}: {}", rank, reason(errno)));
        }
        if (pid == 0) {  // only calls that are safe between fork and exec
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != launcher) {
                _exit(1);
            }
            pthread_sigmask(SIG_SETMASK, &original_mask_, nullptr);
            execve("/proc/self/exe", argument_list.data(), environment_list.data());
            _exit(127);
        }
        ranks_.push_back({.pid = pid});
    }

    [[nodiscard]] std::ptrdiff_t num_running() const {
        return std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.running; });
    }

    void kill_all(int signal_number) {
        for (const Rank& rank : ranks_) {
            if (rank.running) {
                kill(rank.pid, signal_number);
            }
        }
    }

    void take_signal() {
        const auto nanoseconds = std::chrono::nanoseconds(kPollInterval).count();
        const timespec timeout{.tv_sec = 0, .tv_nsec = nanoseconds};
        siginfo_t info{};
        const int number = sigtimedwait(&signals_, &info, &timeout);
        if (number != SIGINT && number != SIGTERM) {
            return;
        }
        ++num_stop_requests_;
        if (num_stop_requests_ > 1) {
            kill_all(SIGKILL);
            return;
        }
        const bool from_terminal = number == SIGINT && info.si_code == SI_KERNEL;
        if (!from_terminal) {  // a terminal has sent it to the ranks already
            kill_all(number);
        }
    }

    void reap() {
        for (Rank& rank : ranks_) {
            int status = 0;
            if (!rank.running || waitpid(rank.pid, &status, WNOHANG) != rank.pid) {
                continue;
            }
            rank.running = false;
            rank.status = status;
            if (status != 0 && first_failure_ == Clock::time_point()) {
                first_failure_ = Clock::now();
                first_failed_ = static_cast<std::size_t>(&rank - ranks_.data());
                store_->set(kRankFailedKey, std::to_string(first_failed_));
            }
            if (WIFSIGNALED(status)) {
                announce(rank);
            }
        }
    }

    /// A rank that a signal ended cannot say so itself.
    void announce(const Rank& rank) {
        if (num_stop_requests_ == 0 && !ending_survivors_) {
            fmt::print(stderr, "hcp: rank {} {}\n", &rank - ranks_.data(), describe(rank.status));
        }
        announced_ = true;
    }

    void end_survivors() {
        if (first_failure_ == Clock::time_point() || num_running() == 0) {
            return;
        }
        const auto since = Clock::now() - first_failure_;
        if (since > kAnnounceAfter && !announced_) {
            announce(ranks_[first_failed_]);
        }
        if (since > options_.grace && !ending_survivors_) {
            fmt::print(stderr,
                       "hcp: ending {} ranks that did not end by themselves within {:.0f} s\n",
                       num_running(), std::chrono::duration<double>(options_.grace).count());
            ending_survivors_ = true;
            kill_all(SIGTERM);
        } else if (since > options_.grace + options_.patience) {
            kill_all(SIGKILL);
        }
    }

    [[nodiscard]] int status() const {
        bool failed = false;
        bool all_usage = true;
        for (const Rank& rank : ranks_) {
            failed = failed || rank.status != 0;
            const bool usage = WIFEXITED(rank.status) && WEXITSTATUS(rank.status) == 2;
            all_usage = all_usage && (rank.status == 0 || usage);
        }
        return !failed ? 0 : all_usage ? 2 : 1;
    }

    LaunchOptions options_;
    sigset_t signals_{};
    sigset_t original_mask_{};
    c10::intrusive_ptr<c10d::Store> store_;
    std::vector<Rank> ranks_;
    int num_stop_requests_ = 0;
    bool announced_ = false;
    bool ending_survivors_ = false;
    std::size_t first_failed_ = 0;
    Clock::time_point first_failure_;
};

}  // namespace

int launch_local_ranks(const LaunchOptions& options) {
    if (options.num_ranks < 1) {
        throw UsageError(
            fmt::format("--nproc {} starts no rank: say 1 or more", options.num_ranks));
    }
    LocalRanks ranks(options);
    ranks.start();
    return ranks.wait();
}

}  // namespace hybridcp::cli
