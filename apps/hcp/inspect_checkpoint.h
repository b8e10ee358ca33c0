// `hcp inspect checkpoint`: what a checkpoint holds, which run has saved it, and whether every byte
// is as it was written.
#pragma once

#include <string>

namespace hybridcp::cli {

struct InspectCheckpointOptions {
    std::string folder = {};  // a checkpoint, or a folder of them
};

/// Returns the exit status: 1 when one is damaged. Errors: FormatError when there is none.
[[nodiscard]] int inspect_checkpoint(const InspectCheckpointOptions& options);

}  // namespace hybridcp::cli
