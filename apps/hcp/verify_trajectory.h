// `hcp verify trajectory`: a recorded training run, step by step, with the trainer's own step and
// optimizer.
#pragma once

#include <string>
#include <vector>

namespace hybridcp::cli {

struct VerifyTrajectoryOptions {
    std::string folder;  // manifest.json; tokens, trace and final .safetensors
    std::string model_folder;
    std::vector<std::string> overrides = {};
    std::string report_path = {};
};

/// Returns the exit status, the same on every rank. Errors: as the library's.
[[nodiscard]] int verify_trajectory(const VerifyTrajectoryOptions& options);

}  // namespace hybridcp::cli
