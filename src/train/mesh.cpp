#include "train/mesh.h"

#include "hybridcp/error.h"

namespace hybridcp {

namespace {
std::shared_ptr<Group> make_axis(const c10::intrusive_ptr<c10d::Store>& store,
                                 const MeshOptions& options,
                                 const std::string& name,
                                 const std::vector<int>& global_ranks) {
    GroupOptions group{.size = static_cast<int>(global_ranks.size()),
                       .timeout = options.timeout,
                       .name = name,
                       .device = options.device,
                       .global_ranks = global_ranks,
                       .liveness = options.liveness};
    while (global_ranks[static_cast<std::size_t>(group.rank)] != options.rank) {
        ++group.rank;
    }
    return Group::make(store, group);
}
}  // namespace

std::vector<std::shared_ptr<Group>> Mesh::groups() const {
    std::vector<std::shared_ptr<Group>> all{world, cp, dp, shards};
    if (replicas != world) {
        all.push_back(replicas);
    }
    return all;
}

void Mesh::set_step(std::int64_t step) const {
    for (const auto& group : groups()) {
        group->set_step(step);
    }
}

void Mesh::reset_recorders() const {
    for (const auto& group : groups()) {
        group->recorder().reset();
    }
}

std::map<std::string, OpTraffic> Mesh::traffic() const {
    std::map<std::string, OpTraffic> all;
    for (const auto& group : groups()) {
        for (const auto& [op, moved] : group->recorder().traffic()) {
            all[op].messages += moved.messages;
            all[op].bytes += moved.bytes;
            all[op].seconds += moved.seconds;
            all[op].cpu_seconds += moved.cpu_seconds;
        }
    }
    return all;
}

Mesh make_mesh(const c10::intrusive_ptr<c10d::Store>& store, const MeshOptions& options) {
    if (options.dp < 1 || options.cp < 1 || options.dp * options.cp != options.world_size) {
        throw UsageError(
            fmt::format("train.accelerator: dp {} times cp {} is {}, but {} ranks were started: "
                        "use --nproc {}, or "
                        "change dp or cp",
                        options.dp, options.cp, options.dp * options.cp, options.world_size,
                        options.dp * options.cp));
    }
    if (options.shard_size < 1 || options.world_size % options.shard_size != 0) {
        throw UsageError(fmt::format(
            "train.accelerator.fsdp_shard_size: {} does not divide the {} ranks: use a divisor, or "
            "leave it out to shard over all ranks",
            options.shard_size, options.world_size));
    }
    const int dp_rank = options.rank / options.cp;
    const int cp_rank = options.rank % options.cp;
    const int replica = options.rank / options.shard_size;
    const int shard = options.rank % options.shard_size;
    std::vector<int> all, same_sequence, same_position, same_replica, same_shard;
    for (int rank = 0; rank < options.world_size; ++rank) {
        all.push_back(rank);
        if (rank / options.cp == dp_rank) {
            same_sequence.push_back(rank);
        }
        if (rank % options.cp == cp_rank) {
            same_position.push_back(rank);
        }
        if (rank / options.shard_size == replica) {
            same_replica.push_back(rank);
        }
        if (rank % options.shard_size == shard) {
            same_shard.push_back(rank);
        }
    }
    Mesh mesh;
    mesh.device = at::Device(options.device);
    mesh.world = make_axis(store, options, "world", all);
    mesh.cp = make_axis(store, options, fmt::format("cp{}", dp_rank), same_sequence);
    mesh.dp = make_axis(store, options, fmt::format("dp{}", cp_rank), same_position);
    mesh.shards = make_axis(store, options, fmt::format("shards{}", replica), same_replica);
    // Without sharding every rank has all, and gradients are summed over the world.
    mesh.replicas = options.shard_size == 1
                        ? mesh.world
                        : make_axis(store, options, fmt::format("replicas{}", shard), same_shard);
    return mesh;
}

}  // namespace hybridcp
