// The command line as values: what was asked for, checked as far as words go.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "hcp/bench_cp.h"
#include "hcp/bench_gdn.h"
#include "hcp/bench_op.h"
#include "hcp/bench_train.h"
#include "hcp/inspect_checkpoint.h"
#include "hcp/inspect_layout.h"
#include "hcp/plan.h"
#include "hcp/train.h"
#include "hcp/verify_model.h"
#include "hcp/verify_op.h"
#include "hcp/verify_parallel.h"
#include "hcp/verify_trajectory.h"

namespace hybridcp::cli {

enum class Command {
    kTrain,
    kVerifyOp,
    kVerifyModel,
    kVerifyTrajectory,
    kVerifyParallel,
    kExport,
    kInspectLayout,
    kInspectCheckpoint,
    kPlan,
    kBenchCp,
    kBenchGdn,
    kBenchOp,
    kBenchTrain,
    kVersion
};

struct Request {
    Command command = Command::kVersion;
    std::optional<int> num_ranks = std::nullopt;  // --nproc
    TrainRequest train = {};
    VerifyOpOptions verify_op = {};
    VerifyModelOptions verify_model = {};
    VerifyTrajectoryOptions verify_trajectory = {};
    VerifyParallelOptions verify_parallel = {};
    ExportRequest export_checkpoint = {};
    BenchCpOptions bench_cp = {};
    BenchGdnOptions bench_gdn = {};
    BenchOpOptions bench_op = {};
    BenchTrainOptions bench_train = {};
    InspectLayoutOptions inspect_layout = {};
    InspectCheckpointOptions inspect_checkpoint = {};
    PlanOptions plan = {};
};

/// Parses the arguments after the program's name. Prints help and returns nothing when that was
/// asked for. Errors: UsageError, one line, for a command or flag that is not known (naming the
/// nearest), or is incomplete.
[[nodiscard]] std::optional<Request> parse_command_line(const std::vector<std::string>& arguments);

/// The arguments without --nproc and its value: those of one rank.
[[nodiscard]] std::vector<std::string> without_nproc(const std::vector<std::string>& arguments);

}  // namespace hybridcp::cli
