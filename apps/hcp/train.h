// `hcp train` and `hcp export`.
#pragma once

#include <string>
#include <vector>

namespace hybridcp::cli {

struct TrainRequest {
    std::string recipe_path;
    std::vector<std::string> overrides = {};
};

/// Trains as the recipe says; SIGINT and SIGTERM finish the step and save. Returns the exit status.
[[nodiscard]] int train(const TrainRequest& request);

struct ExportRequest {
    std::string checkpoint;  // a checkpoint, or a folder of them (the newest complete one is taken)
    std::string folder;
    std::string dtype = "fp32";  // fp32 | bf16
};

/// Writes a checkpoint's model in Hugging Face's format. Returns the exit status.
[[nodiscard]] int export_checkpoint(const ExportRequest& request);

}  // namespace hybridcp::cli
