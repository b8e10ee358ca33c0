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

void Mesh::set_step(std::int64_t step) const {
    for (const auto& group : {world, cp, dp}) {
        group->set_step(step);
    }
}

void Mesh::reset_recorders() const {
    for (const auto& group : {world, cp, dp}) {
        group->recorder().reset();
    }
}

std::map<std::string, OpTraffic> Mesh::traffic() const {
    std::map<std::string, OpTraffic> all;
    for (const auto& group : {world, cp, dp}) {
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
    const int dp_rank = options.rank / options.cp;
    const int cp_rank = options.rank % options.cp;
    std::vector<int> all, same_sequence, same_position;
    for (int rank = 0; rank < options.world_size; ++rank) {
        all.push_back(rank);
        if (rank / options.cp == dp_rank) {
            same_sequence.push_back(rank);
        }
        if (rank % options.cp == cp_rank) {
            same_position.push_back(rank);
        }
    }
    Mesh mesh;
    mesh.device = at::Device(options.device);
    mesh.world = make_axis(store, options, "world", all);
    mesh.cp = make_axis(store, options, fmt::format("cp{}", dp_rank), same_sequence);
    mesh.dp = make_axis(store, options, fmt::format("dp{}", cp_rank), same_position);
    return mesh;
}

}  // namespace hybridcp
