// The process groups of a job: world, and the axes cp (ranks that share a sequence) and dp (ranks
// that share the step). Sharded parameters have axes of their own. Global rank = dp_rank * cp +
// cp_rank, so the ranks of one sequence are neighbours.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/launch_environment.h"
#include "hybridcp/group.h"

namespace hybridcp {

struct Mesh {
    std::shared_ptr<Group> world;
    std::shared_ptr<Group> cp;
    std::shared_ptr<Group> dp;
    // The ranks among which sharded parameters are cut, and those that keep the same part.
    std::shared_ptr<Group> shards;
    std::shared_ptr<Group> replicas;
    at::Device device = at::kCPU;  // of the tensors that the groups exchange

    [[nodiscard]] std::vector<std::shared_ptr<Group>> groups() const;  // each once
    void set_step(std::int64_t step) const;
    void reset_recorders() const;
    /// What this rank has moved in all groups since the last reset.
    [[nodiscard]] std::map<std::string, OpTraffic> traffic() const;
};

struct MeshOptions {
    int rank = 0;
    int world_size = 1;
    int dp = 1;
    int cp = 1;
    int shard_size = 1;  // consecutive ranks that share the parameters among them; 1: none do
    std::string device = "cpu";
    std::chrono::milliseconds timeout{std::chrono::minutes(10)};
    std::shared_ptr<Liveness> liveness = nullptr;
};

/// Errors: UsageError when dp * cp is not the world size (naming both and the launch flag), or the
/// shard size does not divide it.
[[nodiscard]] Mesh make_mesh(const c10::intrusive_ptr<c10d::Store>& store,
                             const MeshOptions& options);

}  // namespace hybridcp
