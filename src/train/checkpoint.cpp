#include "train/checkpoint.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <thread>

#include "core/checksum.h"
#include "core/files.h"
#include "hybridcp/error.h"
#include "train/checkpoint_folders.h"
#include "train/shared_work.h"

namespace hybridcp {

namespace fs = std::filesystem;

namespace {

constexpr std::chrono::milliseconds kPollInterval{50};

at::Tensor flat(const at::Tensor& tensor) {
    return tensor.detach().view({-1});
}

/// The pieces with their moments, each cut in the same way.
struct Share {
    std::vector<ParameterPiece> values, exp_avg, exp_avg_sq;
    [[nodiscard]] const std::vector<ParameterPiece>& of(PieceKind kind) const {
        return kind == PieceKind::kValue    ? values
               : kind == PieceKind::kExpAvg ? exp_avg
                                            : exp_avg_sq;
    }
};

Share make_share(const AdamW& optimizer, const Group& replicas) {
    const auto cut = [&](const std::vector<at::Tensor>* moments) {
        std::vector<ParameterPiece> pieces = optimizer.pieces();
        for (std::size_t i = 0; moments != nullptr && i < pieces.size(); ++i) {
            pieces[i].value = (*moments)[i];
        }
        return share_of_pieces(pieces, replicas.rank(), replicas.size());
    };
    return {cut(nullptr), cut(&optimizer.exp_avg()), cut(&optimizer.exp_avg_sq())};
}

/// Writes this rank's part, if it has any elements, and returns the report of it.
std::string write_part(const std::string& folder, const std::string& name, const Share& share) {
    Manifest part;
    const std::size_t num_pieces = share.values.size();
    if (num_pieces == 0) {
        return report_text(part);
    }
    std::vector<TensorOutline> outlines;
    for (const PieceKind kind : kPieceKinds) {
        for (const ParameterPiece& piece : share.of(kind)) {
            outlines.push_back({.name = stored_tensor_name(kind, piece.name, piece.begin),
                                .shape = {piece.value.numel()}});
        }
    }
    const SafetensorsSums sums = write_safetensors(
        (fs::path(folder) / name).string(), outlines,
        [&](std::size_t i) { return share.of(kPieceKinds[i / num_pieces])[i % num_pieces].value; });
    part.files[name] = {.size_bytes = sums.size_bytes,
                        .checked_bytes = sums.header_bytes,
                        .xxh64 = sums.header_xxh64};
    for (const ParameterPiece& piece : share.values) {
        StoredRun run{.file = name, .begin = piece.begin, .count = piece.value.numel()};
        for (const PieceKind kind : kPieceKinds) {
            run.xxh64[static_cast<std::size_t>(kind)] =
                sums.tensor_xxh64.at(stored_tensor_name(kind, piece.name, piece.begin));
        }
        StoredParameter& parameter = part.parameters[piece.name];
        parameter.shape = piece.shape;
        parameter.runs.push_back(run);
    }
    return report_text(part);
}

StoredFile sum_of_file(const std::string& path) {
    const InputFile file(path);
    return {file.size_bytes(), file.size_bytes(), file.checksum(0, file.size_bytes())};
}

/// What rank 0 writes when all parts are there; the manifest last.
void write_contents(const std::string& folder,
                    const ModelConfig& config,
                    const TrainState& state,
                    const std::vector<std::string>& reports) {
    Manifest manifest{.step = state.step};
    for (const std::string& report : reports) {
        add_report(report, manifest);
    }
    write_model_config(config, folder, at::kFloat);
    write_file_atomically(folder + "/" + kStateFile, state.to_json());
    for (const char* name : {kConfigFile, kStateFile}) {
        manifest.files[name] = sum_of_file(folder + "/" + name);
    }
    write_file_atomically(folder + "/" + kManifestFile, manifest_text(std::move(manifest)));
}

void check_model(const CheckpointReader& reader, const ModelConfig& config) {
    const auto& stored = reader.manifest().parameters;
    const char* advice = "use the model of the checkpoint, or checkpoint.resume: never";
    std::size_t known = 0;
    for (const ParameterShape& parameter : parameter_shapes(config)) {
        const auto found = stored.find(parameter.name);
        if (found == stored.end()) {
            throw UsageError(fmt::format("{}: has no tensor {}, which the recipe's model needs: {}",
                                         reader.folder(), parameter.name, advice));
        }
        if (found->second.shape != parameter.shape) {
            throw UsageError(
                fmt::format("{}: tensor {} is [{}], but [{}] in the recipe's model: {}",
                            reader.folder(), parameter.name, fmt::join(found->second.shape, ", "),
                            fmt::join(parameter.shape, ", "), advice));
        }
        ++known;
    }
    if (known == stored.size()) {
        return;
    }
    auto surplus = stored;
    for (const ParameterShape& parameter : parameter_shapes(config)) {
        surplus.erase(parameter.name);
    }
    throw UsageError(fmt::format("{}: tensor {} is not in the recipe's model: {}", reader.folder(),
                                 surplus.begin()->first, advice));
}

}  // namespace

std::vector<ParameterPiece> share_of_pieces(const std::vector<ParameterPiece>& pieces,
                                            int replica,
                                            int num_replicas) {
    std::int64_t total = 0;
    for (const ParameterPiece& piece : pieces) {
        total += piece.value.numel();
    }
    const std::int64_t first = total * replica / num_replicas;
    const std::int64_t last = total * (replica + 1) / num_replicas;
    std::vector<ParameterPiece> share;
    std::int64_t position = 0;
    for (const ParameterPiece& piece : pieces) {
        const std::int64_t begin = std::max(first, position);
        const std::int64_t end = std::min(last, position + piece.value.numel());
        if (begin < end) {
            ParameterPiece& mine = share.emplace_back(piece);
            mine.begin += begin - position;
            mine.value = flat(piece.value).narrow(0, begin - position, end - begin);
        }
        position += piece.value.numel();
    }
    return share;
}

std::string save_checkpoint(const std::string& dir,
                            const Mesh& mesh,
                            const ModelConfig& config,
                            const AdamW& optimizer,
                            const TrainState& state) {
    const std::string unfinished = unfinished_folder(dir, state.step);
    const auto remove_unfinished = [&] {
        std::error_code ignored;
        if (mesh.world->rank() == 0) {
            fs::remove_all(unfinished, ignored);  // a full disk has room again
        }
    };
    try {
        on_rank_zero(mesh, "create the checkpoint", [&] {
            tidy_checkpoints(dir);
            with_files("create " + unfinished, [&] { fs::create_directories(unfinished); });
        });
        std::string report;
        on_every_rank(mesh, "write the checkpoint", [&] {
            const std::string part = fmt::format("part-{:05}-of-{:05}.safetensors",
                                                 mesh.world->rank(), mesh.world->size());
            report = write_part(unfinished, part, make_share(optimizer, *mesh.replicas));
        });
        const auto reports = gather_text(mesh, "report the checkpoint", report);
        on_rank_zero(mesh, "commit the checkpoint", [&] {
            write_contents(unfinished, config, state, reports);
            name_checkpoint(dir, state.step);
        });
    } catch (const CommError&) {
        throw;  // a rank that is out of reach may still write
    } catch (const Error&) {
        remove_unfinished();
        throw;
    }
    return step_folder(dir, state.step);
}

std::optional<std::string> shared_checkpoint_damage(const Mesh& mesh, const std::string& folder) {
    std::string damage;
    try {
        const CheckpointReader reader(folder);
        (void)reader.state();
        const auto checks = reader.checks();
        std::uint64_t total = 0;
        for (const auto& check : checks) {
            total += check.size_bytes + 1;
        }
        // A check is done by the rank in whose share of the bytes it begins.
        const auto num_ranks = static_cast<std::uint64_t>(mesh.world->size());
        const auto rank = static_cast<std::uint64_t>(mesh.world->rank());
        std::uint64_t begin = 0;
        for (const auto& check : checks) {
            if (damage.empty() && begin >= total * rank / num_ranks &&
                begin < total * (rank + 1) / num_ranks) {
                damage = reader.damage(check).value_or("");
            }
            begin += check.size_bytes + 1;
        }
    } catch (const Error& error) {
        damage = error.what();
    }
    for (const std::string& found : gather_text(mesh, "check the checkpoint", damage)) {
        if (!found.empty()) {
            return found;
        }
    }
    return std::nullopt;
}

std::optional<std::string> shared_latest_checkpoint(
    const Mesh& mesh, const std::string& dir, const std::function<void(const std::string&)>& skip) {
    std::string names;  // as rank 0 sees them, each ended by a newline, the newest last
    on_rank_zero(mesh, "find the checkpoint", [&] {
        for (const auto& [step, folder] : list_checkpoints(dir)) {
            names += fs::path(folder).filename().string() + "\n";
        }
    });
    names = gather_text(mesh, "find the checkpoint", names).front();
    while (!names.empty()) {
        names.pop_back();
        const std::size_t begin = names.find_last_of('\n') + 1;  // npos + 1 is 0
        std::string folder = (fs::path(dir) / names.substr(begin)).string();
        names.resize(begin);
        const auto damage = shared_checkpoint_damage(mesh, folder);
        if (!damage) {
            return folder;
        }
        skip(*damage);
    }
    return std::nullopt;
}

TrainState load_checkpoint(const std::string& folder, const ModelConfig& config, AdamW& optimizer) {
    const CheckpointReader reader(folder);
    check_model(reader, config);
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < optimizer.pieces().size(); ++i) {
        const ParameterPiece& piece = optimizer.pieces()[i];
        reader.read_run(PieceKind::kValue, piece.name, piece.begin, flat(piece.value));
        reader.read_run(PieceKind::kExpAvg, piece.name, piece.begin, flat(optimizer.exp_avg()[i]));
        reader.read_run(PieceKind::kExpAvgSq, piece.name, piece.begin,
                        flat(optimizer.exp_avg_sq()[i]));
    }
    const TrainState state = reader.state();
    optimizer.set_num_updates(state.step);
    return state;
}

void check_shared_folder(const Mesh& mesh,
                         const std::string& folder,
                         std::chrono::milliseconds patience) {
    if (mesh.world->size() == 1) {
        return;
    }
    std::string token;
    if (mesh.world->rank() == 0) {
        std::random_device random;
        token = fmt::format("{:08x}{:08x}", random(), random());
    }
    token = gather_text(mesh, "see the checkpoint folder", token).front();
    const std::string path = folder + "/seen-by-all-" + token;
    on_rank_zero(mesh, "see the checkpoint folder", [&] { write_file_atomically(path, token); });
    on_every_rank(mesh, "see the checkpoint folder", [&] {
        const auto deadline = std::chrono::steady_clock::now() + patience;
        while (!path_exists(path) && std::chrono::steady_clock::now() < deadline) {
            std::this_thread::sleep_for(kPollInterval);
        }
        if (!path_exists(path)) {
            throw UsageError(fmt::format(
                "rank {} does not see the folder {} of rank 0: checkpoints need one that all "
                "ranks share, on a file system between the machines (verify parallel: TMPDIR)",
                mesh.world->rank(), folder));
        }
    });
    on_rank_zero(mesh, "see the checkpoint folder", [&] { fs::remove(path); });
}

}  // namespace hybridcp
