// This process in its job: who it is, the groups it belongs to, and what its command-line overrides
// ask for.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/launch_environment.h"
#include "comm/liveness.h"
#include "train/mesh.h"
#include "train/recipe.h"

namespace hybridcp::cli {

class Session {
  public:
    /// Meets the other ranks. Do all that can fail on the request alone before: here ranks start to
    /// wait. Errors: UsageError when dp times cp is not the number of ranks; CommError.
    Session(const LaunchEnvironment& environment,
            const ParallelOptions& options,
            std::chrono::milliseconds timeout);

    [[nodiscard]] int rank() const { return environment_.rank; }
    [[nodiscard]] int num_ranks() const { return environment_.world_size; }
    [[nodiscard]] const Mesh& mesh() const { return mesh_; }
    [[nodiscard]] int dp_rank() const { return mesh_.dp->rank(); }
    /// Rank 0's `text`, on every rank. Each key is used once.
    [[nodiscard]] std::string text_of_rank_0(const std::string& key, const std::string& text);
    /// Runs `judge` on rank 0 and returns its exit status on every rank, after which a rank may
    /// end. What it throws goes on on rank 0; the others return the error's exit status. The others
    /// wait as long as it takes.
    [[nodiscard]] int conclude(const std::function<int()>& judge);

  private:
    int share(int status);
    void wait_for_others();

    LaunchEnvironment environment_;
    c10::intrusive_ptr<c10d::Store> store_;
    std::shared_ptr<Liveness> liveness_;
    Mesh mesh_;
};

/// Makes this rank's own GPU the current one when `device` is cuda. Errors: UsageError when there
/// is none.
void select_device(const std::string& device, const LaunchEnvironment& environment);

/// A mesh of one rank, which exchanges nothing.
[[nodiscard]] Mesh one_rank_mesh(const std::string& device);

/// The `train` and `model.dtype` part of a recipe for a command that has none: `base` (YAML), then
/// --dtype, then the overrides; cp is what dp leaves of the ranks unless it is given. Errors: as
/// parse_recipe.
struct OverrideRequest {
    std::string command;  // for messages
    std::string base;
    std::string dtype;  // of --dtype; empty: not given
    std::vector<std::string> overrides;
    int num_ranks = 1;
};
[[nodiscard]] Recipe recipe_from_overrides(const OverrideRequest& request);

/// kFloat or kBFloat16 of model.dtype.
[[nodiscard]] at::ScalarType compute_dtype(const Recipe& recipe);

/// "fp32 on cpu, 4 ranks (dp 1, cp 4; linear attention p2p, full attention all_gather, eager)".
[[nodiscard]] std::string describe_run(const Recipe& recipe);

}  // namespace hybridcp::cli
