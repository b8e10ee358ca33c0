// The command line: parse, dispatch, and turn every failure into one line on stderr and an exit
// status: 1 a check or a run failed, 2 the request was wrong.
#include <ATen/Context.h>
#include <fmt/format.h>
#include <malloc.h>
#include <torch/version.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "comm/launch_environment.h"
#include "hcp/command_line.h"
#include "hcp/launcher.h"
#include "hybridcp/error.h"

namespace hybridcp::cli {

namespace {

int print_version() {
    fmt::print("hcp {} (libtorch {}, {})\n", HCP_VERSION, TORCH_VERSION,
#ifdef HCP_CUDA
               "CPU and CUDA"
#else
               "CPU only"
#endif
    );
    return 0;
}

int dispatch(const Request& request) {
    switch (request.command) {
        case Command::kTrain:
            return train(request.train);
        case Command::kVerifyModel:
            return verify_model(request.verify_model);
        case Command::kVerifyTrajectory:
            return verify_trajectory(request.verify_trajectory);
        case Command::kVerifyParallel:
            return verify_parallel(request.verify_parallel);
        case Command::kBenchCp:
            return bench_cp(request.bench_cp);
        case Command::kBenchGdn:
            return bench_gdn(request.bench_gdn);
        case Command::kBenchOp:
            return bench_op(request.bench_op);
        case Command::kBenchTrain:
            return bench_train(request.bench_train);
        case Command::kExport:
            return export_checkpoint(request.export_checkpoint);
        case Command::kInspectLayout:
            return inspect_layout(request.inspect_layout);
        case Command::kInspectCheckpoint:
            return inspect_checkpoint(request.inspect_checkpoint);
        case Command::kPlan:
            return run_plan(request.plan);
        case Command::kVerifyOp:
            return verify_op(request.verify_op);
        case Command::kVersion:
            return print_version();
    }
    throw CheckError("a command without an action");
}

int run(const std::vector<std::string>& arguments) {
    const std::optional<Request> request = parse_command_line(arguments);
    if (!request) {
        return 0;
    }
    if (!request->num_ranks || *request->num_ranks == 1) {
        return dispatch(*request);
    }
    const LaunchEnvironment environment = read_launch_environment();
    if (environment.source != "single") {
        throw UsageError(
            fmt::format("--nproc starts ranks itself, but {} has started this process as rank {}: "
                        "leave --nproc out",
                        environment.source, environment.rank));
    }
    std::vector<std::string> rank_arguments = without_nproc(arguments);
    rank_arguments.insert(rank_arguments.begin(), "hcp");
    return launch_local_ranks({.num_ranks = *request->num_ranks, .arguments = rank_arguments});
}

// A wrong request is wrong on every rank alike, and a bad file at least on every rank of a machine:
// one says so.
bool is_said_elsewhere(const Error& error) {
    if (error.exit_status() != 2) {
        return false;
    }
    try {
        const LaunchEnvironment environment = read_launch_environment();
        return error.kind() == ErrorKind::kUsage ? environment.rank != 0
                                                 : environment.local_rank != 0;
    } catch (const Error&) {
        return false;
    }
}

std::string first_line(const std::string& text) {
    return text.substr(0, text.find('\n'));
}

int guarded_run(const std::vector<std::string>& arguments) {
    try {
        return run(arguments);
    } catch (const Error& error) {
        if (!is_said_elsewhere(error)) {
            fmt::print(stderr, "hcp: {}\n", first_line(error.what()));
        }
        return error.exit_status();
    } catch (const std::exception& error) {
        fmt::print(stderr, "hcp: internal error: {}\n", first_line(error.what()));
        return 1;
    }
}

/// Each step frees and takes the same large tensors again. Kept by the allocator they need no new
/// pages; by default glibc gives them back and their page faults cost up to half of a step on the
/// CPU.
void keep_freed_memory() {
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, -1);  // never
}

}  // namespace

}  // namespace hybridcp::cli

int main(int argc, char** argv) {
    hybridcp::cli::keep_freed_memory();
    hybridcp::quiet_backend_logs();
    std::signal(SIGXFSZ, SIG_IGN);  // so that a write beyond a limit fails, and says where
    // libtorch's record of recent collectives: memory that grows for as many steps as it holds.
    setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
    return hybridcp::cli::guarded_run(std::vector<std::string>(argv + 1, argv + argc));
}
