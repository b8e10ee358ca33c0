// The process groups of a job: world, and the axes cp (ranks that share a sequence) and dp (ranks
// that share the step). Global rank = dp_rank * cp + cp_rank, so the ranks of one sequence are
// neighbours.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>

#include "comm/launch_environment.h"
#include "hybridcp/group.h"

namespace hybridcp {

struct Mesh {
    std::shared_ptr<Group> world;
    std::shared_ptr<Group> cp;
    std::shared_ptr<Group> dp;
    at::Device device = at::kCPU;  // of the tensors that the groups exchange

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
    std::string device = "cpu";
    std::chrono::milliseconds timeout{std::chrono::minutes(10)};
    std::shared_ptr<Liveness> liveness = nullptr;
};

/// Errors: UsageError when dp * cp is not the world size (naming both and the launch flag).
[[nodiscard]] Mesh make_mesh(const c10::intrusive_ptr<c10d::Store>& store,
                             const MeshOptions& options);

}  // namespace hybridcp
