// Saving and loading a run's state, by all ranks together: each writes its part, and reads what it
// keeps, whatever ranks have written it. Folders appear complete or not at all.
// docs/checkpoints.md.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "hybridcp/model.h"
#include "train/checkpoint_reader.h"
#include "train/mesh.h"
#include "train/optimizer.h"

namespace hybridcp {

/// What of the pieces this rank writes: of those that every rank of `replicas` keeps, an equal
/// share of the elements.
[[nodiscard]] std::vector<ParameterPiece> share_of_pieces(const std::vector<ParameterPiece>& pieces,
                                                          int replica,
                                                          int num_replicas);

/// Writes DIR/step-N: parts by every rank, then the manifest and the name by rank 0. Returns its
/// path. Errors: the same on every rank, naming path and reason; the older checkpoints stay, and
/// so does an older one of the same name.
std::string save_checkpoint(const std::string& dir,
                            const Mesh& mesh,
                            const ModelConfig& config,
                            const AdamW& optimizer,
                            const TrainState& state);

/// checkpoint_damage with the bytes dealt to the ranks, each read once; the same on every rank.
[[nodiscard]] std::optional<std::string> shared_checkpoint_damage(const Mesh& mesh,
                                                                  const std::string& folder);

/// latest_checkpoint by all ranks; `skip` is called with a line for each that is damaged.
[[nodiscard]] std::optional<std::string> shared_latest_checkpoint(
    const Mesh& mesh, const std::string& dir, const std::function<void(const std::string&)>& skip);

/// Reads this rank's pieces and moments, in place, and the counters. Errors: FormatError naming an
/// unreadable file; UsageError naming a tensor that the model has not, lacks, or has in another
/// shape.
[[nodiscard]] TrainState load_checkpoint(const std::string& folder,
                                         const ModelConfig& config,
                                         AdamW& optimizer);

/// Makes sure that every rank sees the same folder. `patience`: how long a new file may take to be
/// seen on other machines. Errors: UsageError naming rank and folder.
void check_shared_folder(const Mesh& mesh,
                         const std::string& folder,
                         std::chrono::milliseconds patience = std::chrono::seconds(10));

}  // namespace hybridcp
