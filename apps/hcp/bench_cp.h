// `hcp bench cp`: one training step under each way to run the linear-attention layers over ranks,
// against gather_hidden, at several numbers of ranks. Results are verified against one rank before
// anything is timed.
#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

#include "hybridcp/parallel.h"

namespace hybridcp::cli {

struct BenchCpOptions {
    std::string recipe_path;
    std::vector<std::string> overrides;
    std::vector<int> ranks{2, 4, 8, 16};
    std::vector<std::string> variants;    // names; empty: all
    std::vector<std::int64_t> documents;  // tokens; empty: one of data.sequence_length
    std::string level = "model";          // model | layer
    int warm_up = 5;
    int repeats = 20;
    std::string report_path;
    std::string worker_output;  // set by the command itself for the ranks that it starts
};

/// A way to run the linear layers.
struct BenchVariant {
    std::string name;
    Parallel parallel;
};

/// Those that the model and the number of ranks support, by name. Errors: UsageError for a name
/// that is not known.
[[nodiscard]] std::vector<BenchVariant> bench_variants(const BenchCpOptions& options,
                                                       const ParallelOptions& accelerator,
                                                       const HeadCounts& heads,
                                                       const std::string& dtype);

/// The table of all results (docs/benchmarks.md says what its columns are).
[[nodiscard]] std::string bench_cp_table(const nlohmann::json& results);

/// Starts the ranks of each size by itself, or (under torchrun, --worker-output) is one of them.
[[nodiscard]] int bench_cp(const BenchCpOptions& options);
/// One rank of one size: measures and writes JSON to worker_output (rank 0).
[[nodiscard]] int bench_cp_worker(const BenchCpOptions& options);

}  // namespace hybridcp::cli
