// `hcp verify parallel`: a recipe's training on all ranks and on one rank, step by step.
#pragma once

#include <string>
#include <vector>

namespace hybridcp::cli {

struct VerifyParallelOptions {
    std::string recipe_path;
    std::vector<std::string> overrides = {};
    std::string report_path = {};
    bool chunk_bar = false;  // widen the fp32 bar to twice the difference that another chunk size
                             // makes on one rank
};

/// Returns the exit status, the same on every rank. Errors: as the library's.
[[nodiscard]] int verify_parallel(const VerifyParallelOptions& options);

}  // namespace hybridcp::cli
