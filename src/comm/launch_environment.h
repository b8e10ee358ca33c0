// Who this process is in the job: read from the variables of torchrun (or `hcp --nproc`), Slurm or
// Open MPI, and the store through which the ranks find each other.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace hybridcp {

struct LaunchEnvironment {
    int rank = 0;
    int world_size = 1;
    int local_rank = 0;
    std::string master_addr = "127.0.0.1";
    int master_port = 0;  // 0: a single process that needs no store
    bool store_is_external =
        false;  // the launcher hosts the store (TORCHELASTIC_USE_AGENT_STORE=True)
    int attempt =
        0;  // of an elastic launcher, whose store still holds the keys of the earlier ones
    std::string source = "single";  // single | torchrun | slurm | openmpi, for messages
};

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; else SLURM_PROCID, SLURM_NTASKS,
/// SLURM_LOCALID; else OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK; else a single process. Errors:
/// UsageError naming the variable that is missing, not a number, or out of range.
[[nodiscard]] LaunchEnvironment read_launch_environment();

/// Connects to (rank 0 without an external store: hosts) the TCP store at master_addr:master_port.
/// Errors: CommError naming address and port.
[[nodiscard]] c10::intrusive_ptr<c10d::Store> connect_store(const LaunchEnvironment& environment,
                                                            std::chrono::milliseconds timeout);

/// Hosts a TCP store on a free local port for local ranks to connect to; sets `port`.
[[nodiscard]] c10::intrusive_ptr<c10d::Store> host_store(int& port);

/// For a program that reports errors in one line: keeps c10d from printing the stack traces of its
/// own exceptions, unless the user asked for its log with TORCH_CPP_LOG_LEVEL.
void quiet_backend_logs();

}  // namespace hybridcp
