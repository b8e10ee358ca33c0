// Checkpoints: folders DIR/step-00000050 that are complete or absent. Each holds model.safetensors
// (fp32, Hugging Face's names) and config.json, so that it loads as a model folder;
// optimizer.safetensors; state.json; and manifest.json, written last, with the size and checksum of
// each. Only one process touches the disk (train's rank 0).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hybridcp/model.h"
#include "train/optimizer.h"

namespace hybridcp {

/// What is needed to go on, besides tensors.
struct TrainState {
    std::int64_t step = 0;           // finished updates
    std::int64_t consumed_rows = 0;  // of the data order
    std::int64_t seed = 0;
    std::string data_fingerprint = {};  // what the order of rows depends on
    std::uint64_t recipe_hash = 0;
};

/// Writes DIR/step-N.tmp, syncs it, renames it to DIR/step-N (an older one of that name is
/// replaced), and returns its path. Errors: FormatError naming the path and the system's reason;
/// the older checkpoints stay.
std::string save_checkpoint(const std::string& dir,
                            const HybridModel& model,
                            const AdamW& optimizer,
                            const TrainState& state);

/// Deletes complete checkpoints of `dir` that are older than `step`, but for the newest `keep` - 1
/// of them.
void prune_checkpoints(const std::string& dir, std::int64_t step, std::int64_t keep);

/// Says why a checkpoint folder cannot be used (no manifest, a file missing, of another size or
/// checksum), or nothing when it is complete.
[[nodiscard]] std::optional<std::string> checkpoint_damage(const std::string& folder);

/// The newest complete checkpoint of `dir`. Damaged or partial ones are skipped, with a line each
/// in `skipped`.
[[nodiscard]] std::optional<std::string> latest_checkpoint(const std::string& dir,
                                                           std::vector<std::string>& skipped);

/// Renames every DIR/step-N to DIR/replaced-step-N (replacing those), for a run that starts anew.
/// Returns how many there were.
std::int64_t set_checkpoints_aside(const std::string& dir);

/// Reads a checkpoint that checkpoint_damage calls complete into the model's parameters and the
/// optimizer's moments, in place. Errors: FormatError naming an unreadable file; UsageError naming
/// a tensor that the model has not, lacks, or has in another shape.
[[nodiscard]] TrainState load_checkpoint(const std::string& folder,
                                         const HybridModel& model,
                                         AdamW& optimizer);

}  // namespace hybridcp
