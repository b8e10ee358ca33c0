// `--nproc N`: starts N ranks of this program on this machine, passes signals on to them, and sees
// to it that none outlives a failed one for long.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace hybridcp::cli {

/// Set in the job's store by this launcher once a rank has failed, for ranks that wait without a
/// collective.
inline constexpr const char* kRankFailedKey = "hcp/rank_failed";

struct LaunchOptions {
    int num_ranks = 1;
    std::vector<std::string> arguments;  // of every rank, without --nproc
    /// After a rank has failed, the others may end by themselves (they name the peer that is gone);
    /// then SIGTERM.
    std::chrono::milliseconds grace = std::chrono::seconds(30);
    /// After SIGTERM; then SIGKILL.
    std::chrono::milliseconds patience = std::chrono::seconds(10);
};

/// Returns the exit status: 0 if every rank ended with 0; 2 if all that failed ended with 2;
/// else 1. Ranks find each other through torchrun's variables and a store that this process hosts.
/// Errors: UsageError for less than one rank; CommError when the store or a process cannot be
/// started.
[[nodiscard]] int launch_local_ranks(const LaunchOptions& options);

}  // namespace hybridcp::cli
