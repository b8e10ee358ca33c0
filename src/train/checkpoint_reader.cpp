#include "train/checkpoint_reader.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "core/files.h"
#include "hybridcp/error.h"
#include "train/checkpoint_folders.h"

namespace hybridcp {

namespace {
constexpr std::size_t kMaxOpenParts =
    64;  // a checkpoint may have more parts than files may be open
}  // namespace

std::string TrainState::to_json() const {
    const nlohmann::json json{{"step", step},
                              {"consumed_rows", consumed_rows},
                              {"seed", seed},
                              {"data_fingerprint", data_fingerprint},
                              {"recipe_hash", recipe_hash},
                              {"topology", topology}};
    return json.dump(2) + "\n";
}

TrainState TrainState::from_json(const std::string& text, const std::string& path) {
    try {
        const auto json = nlohmann::json::parse(text);
        return {.step = json.at("step"),
                .consumed_rows = json.at("consumed_rows"),
                .seed = json.at("seed"),
                .data_fingerprint = json.at("data_fingerprint"),
                .recipe_hash = json.at("recipe_hash"),
                .topology = json.at("topology")};
    } catch (const nlohmann::json::exception& error) {
        throw FormatError(fmt::format("{}: {}", path, error.what()));
    }
}

CheckpointReader::CheckpointReader(std::string folder)
    : folder_(std::move(folder)), manifest_(read_manifest(folder_)) {
    for (const char* needed : {kStateFile, kConfigFile}) {
        if (!manifest_.files.contains(needed)) {
            throw FormatError(fmt::format("{}: does not list {}", path_of(kManifestFile), needed));
        }
    }
    for (const auto& [name, parameter] : manifest_.parameters) {
        for (const StoredRun& run : parameter.runs) {
            if (!manifest_.files.contains(run.file)) {
                throw FormatError(fmt::format("{}: does not list {}, where {} is",
                                              path_of(kManifestFile), run.file, name));
            }
        }
    }
}

TrainState CheckpointReader::state() const {
    check_file(kStateFile);
    TrainState state = TrainState::from_json(read_file(path_of(kStateFile)), path_of(kStateFile));
    const auto named = step_of_folder(folder_);
    if (named && *named != state.step) {
        throw FormatError(
            fmt::format("{}: holds step {}: give it the name of its step", folder_, state.step));
    }
    return state;
}

void CheckpointReader::check_file(const std::string& name) const {
    const StoredFile& stored = manifest_.files.at(name);
    const std::string path = path_of(name);
    if (!path_exists(path)) {
        throw FormatError(fmt::format("{}: the file is missing", path));
    }
    const InputFile file(path);
    if (file.size_bytes() < stored.size_bytes) {
        throw FormatError(
            fmt::format("{}: cut at byte {} of {}", path, file.size_bytes(), stored.size_bytes));
    }
    if (file.size_bytes() > stored.size_bytes) {
        throw FormatError(fmt::format("{}: {} bytes, the manifest says {}", path, file.size_bytes(),
                                      stored.size_bytes));
    }
    if (file.checksum(0, stored.checked_bytes) != stored.xxh64) {
        throw FormatError(fmt::format("{}: {}bytes 0 to {} do not have their checksum", path,
                                      stored.checked_bytes < stored.size_bytes ? "header, " : "",
                                      stored.checked_bytes));
    }
}

const SafetensorsFile& CheckpointReader::open_part(const std::string& name) const {
    const auto found = open_parts_.find(name);
    if (found != open_parts_.end()) {
        return *found->second;
    }
    if (open_parts_.size() >= kMaxOpenParts) {
        open_parts_.clear();
    }
    check_file(name);
    return *(open_parts_[name] = std::make_unique<SafetensorsFile>(path_of(name)));
}

void CheckpointReader::read_run(PieceKind kind,
                                const std::string& parameter,
                                std::int64_t begin,
                                const at::Tensor& into) const {
    const auto found = manifest_.parameters.find(parameter);
    if (found == manifest_.parameters.end()) {
        throw UsageError(fmt::format("{}: has no tensor {}", folder_, parameter));
    }
    const std::vector<StoredRun>& runs = found->second.runs;
    const std::int64_t end = begin + into.numel();
    auto run = std::upper_bound(
        runs.begin(), runs.end(), begin,
        [](std::int64_t position, const StoredRun& stored) { return position < stored.end(); });
    for (; run != runs.end() && run->begin < end; ++run) {
        const std::int64_t first = std::max(begin, run->begin);
        const std::int64_t last = std::min(end, run->end());
        open_part(run->file).read_run(stored_tensor_name(kind, parameter, run->begin),
                                      first - run->begin,
                                      into.narrow(0, first - begin, last - first));
    }
}

void CheckpointReader::read(const ParameterShape& parameter,
                            std::int64_t begin,
                            const at::Tensor& into) const {
    read_run(PieceKind::kValue, parameter.name, begin, into);
}

at::Tensor CheckpointReader::value(const std::string& parameter) const {
    const auto found = manifest_.parameters.find(parameter);
    if (found == manifest_.parameters.end()) {
        throw UsageError(fmt::format("{}: has no tensor {}", folder_, parameter));
    }
    return read_parameter(*this, {.name = parameter, .shape = found->second.shape}, at::kCPU);
}

std::vector<CheckpointReader::Check> CheckpointReader::checks() const {
    std::map<std::string, std::vector<Check>> tensors;
    for (const auto& [name, parameter] : manifest_.parameters) {
        for (const StoredRun& run : parameter.runs) {
            for (const PieceKind kind : kPieceKinds) {
                tensors[run.file].push_back(
                    {.file = run.file,
                     .tensor = stored_tensor_name(kind, name, run.begin),
                     .size_bytes = static_cast<std::uint64_t>(run.count) * sizeof(float),
                     .xxh64 = run.xxh64[static_cast<std::size_t>(kind)]});
            }
        }
    }
    std::vector<Check> all;
    for (const auto& [name, file] : manifest_.files) {
        all.push_back({.file = name, .size_bytes = file.checked_bytes, .xxh64 = file.xxh64});
        const auto& inside = tensors[name];
        all.insert(all.end(), inside.begin(), inside.end());
    }
    return all;
}

void CheckpointReader::check_tensor(const Check& check) const {
    const SafetensorsFile& file = open_part(check.file);
    const auto found = file.entries().find(check.tensor);
    if (found == file.entries().end()) {
        throw FormatError(fmt::format("{}: has no tensor {}", file.path(), check.tensor));
    }
    const SafetensorsFile::Entry& entry = found->second;
    if (entry.dtype != at::kFloat || entry.end - entry.begin != check.size_bytes) {
        throw FormatError(fmt::format("{}: tensor {} has {} bytes of {}, {} of Float expected",
                                      file.path(), check.tensor, entry.end - entry.begin,
                                      at::toString(entry.dtype), check.size_bytes));
    }
    if (file.checksum(check.tensor) != check.xxh64) {
        throw FormatError(fmt::format("{}: tensor {}, bytes {} to {} do not have their checksum",
                                      file.path(), check.tensor, file.header_bytes() + entry.begin,
                                      file.header_bytes() + entry.end));
    }
}

std::optional<std::string> CheckpointReader::damage(const Check& check) const {
    try {
        if (check.tensor.empty()) {
            check_file(check.file);
        } else {
            check_tensor(check);
        }
    } catch (const Error& error) {
        return error.what();
    }
    return std::nullopt;
}

std::optional<std::string> checkpoint_damage(const std::string& folder) {
    try {
        const CheckpointReader reader(folder);
        (void)reader.state();
        for (const CheckpointReader::Check& check : reader.checks()) {
            if (auto damage = reader.damage(check)) {
                return damage;
            }
        }
    } catch (const Error& error) {
        return error.what();
    }
    return std::nullopt;
}

std::optional<std::string> latest_checkpoint(const std::string& dir,
                                             std::vector<std::string>& skipped) {
    const auto found = list_checkpoints(dir);
    for (auto entry = found.rbegin(); entry != found.rend(); ++entry) {
        const auto damage = checkpoint_damage(entry->second);
        if (!damage) {
            return entry->second;
        }
        skipped.push_back(*damage);
    }
    return std::nullopt;
}

}  // namespace hybridcp
