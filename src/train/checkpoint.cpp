#include "train/checkpoint.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string_view>

#include <nlohmann/json.hpp>

#include "core/files.h"
#include "hybridcp/error.h"
#include "model/safetensors.h"

namespace hybridcp {

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kVersion = 1;
constexpr std::string_view kFolderPrefix = "step-";
constexpr const char* kModelFile = "model.safetensors";
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kStateFile = "state.json";
constexpr const char* kManifestFile = "manifest.json";

std::string step_folder(const std::string& dir, std::int64_t step) {
    return (fs::path(dir) / fmt::format("{}{:08}", kFolderPrefix, step)).string();
}

/// The step of a folder named step-N; nothing for another name.
std::optional<std::int64_t> step_of_folder(const fs::path& folder) {
    const std::string name = folder.filename().string();
    std::int64_t step = 0;
    if (!name.starts_with(kFolderPrefix)) {
        return std::nullopt;
    }
    const auto [end, error] =
        std::from_chars(name.data() + kFolderPrefix.size(), name.data() + name.size(), step);
    return error == std::errc{} && end == name.data() + name.size() ? std::optional(step)
                                                                    : std::nullopt;
}

/// All step-N folders, the newest last.
std::map<std::int64_t, std::string> list_checkpoints(const std::string& dir) {
    std::map<std::int64_t, std::string> found;
    std::error_code none;  // a dir that does not exist holds none
    for (const auto& entry : fs::directory_iterator(dir, none)) {
        if (const auto step = step_of_folder(entry.path()); step && entry.is_directory()) {
            found[*step] = entry.path().string();
        }
    }
    return found;
}

/// Runs a std::filesystem action; its failure becomes a FormatError.
template <typename Action>
void with_files(const std::string& what, const Action& action) {
    try {
        action();
    } catch (const fs::filesystem_error& error) {
        throw FormatError(fmt::format("cannot {}: {}", what, error.code().message()));
    }
}

struct FileSum {
    std::uint64_t size_bytes = 0;
    std::uint64_t fnv1a64 = 0xcbf29ce484222325ULL;
};

FileSum sum_file(const std::string& path) {
    std::ifstream stream(path, std::ios::binary);
    if (!stream) {
        throw FormatError(fmt::format("cannot read {}: {}", path, std::strerror(errno)));
    }
    FileSum sum;
    std::vector<char> buffer(std::size_t{1} << 20);
    while (stream) {
        stream.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
        const auto count = static_cast<std::size_t>(stream.gcount());
        for (std::size_t i = 0; i < count; ++i) {
            sum.fnv1a64 = (sum.fnv1a64 ^ static_cast<unsigned char>(buffer[i])) * 0x100000001b3ULL;
        }
        sum.size_bytes += count;
    }
    return sum;
}

nlohmann::json read_json(const std::string& path) {
    nlohmann::json value = nlohmann::json::parse(read_file(path), nullptr, false);
    if (!value.is_object()) {
        throw FormatError(fmt::format("{}: not a JSON object", path));
    }
    return value;
}

void write_tensors(const std::string& folder, const HybridModel& model, const AdamW& optimizer) {
    std::vector<std::pair<std::string, at::Tensor>> values;
    std::vector<std::pair<std::string, at::Tensor>> moments;
    for (std::size_t i = 0; i < model.parameters().size(); ++i) {
        const NamedParameter& parameter = model.parameters()[i];
        values.emplace_back(parameter.name, parameter.value.detach());
        moments.emplace_back("exp_avg." + parameter.name, optimizer.exp_avg()[i]);
        moments.emplace_back("exp_avg_sq." + parameter.name, optimizer.exp_avg_sq()[i]);
    }
    write_safetensors((fs::path(folder) / kModelFile).string(), values, {{"format", "pt"}});
    write_safetensors((fs::path(folder) / kOptimizerFile).string(), moments);
    write_model_config(model.config(), folder, at::kFloat);
}

void write_state_and_manifest(const std::string& folder, const TrainState& state) {
    const nlohmann::json value{{"step", state.step},
                               {"consumed_rows", state.consumed_rows},
                               {"seed", state.seed},
                               {"data_fingerprint", state.data_fingerprint},
                               {"recipe_hash", state.recipe_hash}};
    write_file_atomically((fs::path(folder) / kStateFile).string(), value.dump(2) + "\n");
    nlohmann::json files = nlohmann::json::object();
    for (const auto& entry : fs::directory_iterator(folder)) {
        const FileSum sum = sum_file(entry.path().string());
        files[entry.path().filename().string()] = {{"bytes", sum.size_bytes},
                                                   {"fnv1a64", sum.fnv1a64}};
    }
    const nlohmann::json manifest{{"version", kVersion}, {"files", files}};
    write_file_atomically((fs::path(folder) / kManifestFile).string(), manifest.dump(2) + "\n");
}

/// Copies `name` of a file into `into`. Errors: UsageError when the shape differs.
void read_into(const SafetensorsFile& file, const std::string& name, const at::Tensor& into) {
    if (!file.contains(name)) {
        throw UsageError(
            fmt::format("{}: has no tensor {}, which the recipe's model needs: use the model "
                        "of the checkpoint, or checkpoint.resume: never",
                        file.path(), name));
    }
    const at::IntArrayRef shape(file.entries().at(name).shape);
    if (shape != into.sizes()) {
        throw UsageError(
            fmt::format("{}: tensor {} is [{}], but [{}] in the recipe's model: use the model of "
                        "the checkpoint, "
                        "or checkpoint.resume: never",
                        file.path(), name, fmt::join(shape, ", "), fmt::join(into.sizes(), ", ")));
    }
    const at::NoGradGuard no_grad;
    into.copy_(file.read(name));
}

void refuse_surplus(const SafetensorsFile& file, const HybridModel& model) {
    std::set<std::string> known;
    for (const NamedParameter& parameter : model.parameters()) {
        known.insert(parameter.name);
    }
    for (const auto& [name, entry] : file.entries()) {
        if (!known.contains(name)) {
            throw UsageError(
                fmt::format("{}: tensor {} is not in the recipe's model: use the model of "
                            "the checkpoint, or checkpoint.resume: never",
                            file.path(), name));
        }
    }
}
}  // namespace

std::string save_checkpoint(const std::string& dir,
                            const HybridModel& model,
                            const AdamW& optimizer,
                            const TrainState& state) {
    const std::string folder = step_folder(dir, state.step);
    const std::string temporary = folder + ".tmp";
    with_files("create " + temporary, [&] {
        fs::remove_all(temporary);
        fs::create_directories(temporary);
        write_tensors(temporary, model, optimizer);
        write_state_and_manifest(temporary, state);
    });
    sync_folder(temporary);
    with_files("write " + folder, [&] {
        fs::remove_all(folder);
        fs::rename(temporary, folder);
    });
    sync_folder(dir);
    return folder;
}

void prune_checkpoints(const std::string& dir, std::int64_t step, std::int64_t keep) {
    std::vector<std::string> older;
    for (const auto& [other_step, folder] : list_checkpoints(dir)) {
        if (other_step < step && fs::exists(fs::path(folder) / kManifestFile)) {
            older.push_back(folder);
        }
    }
    const auto surplus = static_cast<std::int64_t>(older.size()) - (keep - 1);
    for (std::int64_t i = 0; i < surplus; ++i) {
        const std::string& folder = older[static_cast<std::size_t>(i)];
        // Renamed first: a crash while files disappear must not leave half of one under its name.
        with_files("delete " + folder, [&] {
            fs::rename(folder, folder + ".tmp");
            fs::remove_all(folder + ".tmp");
        });
    }
}

std::optional<std::string> checkpoint_damage(const std::string& folder) {
    try {
        const std::string manifest_path = (fs::path(folder) / kManifestFile).string();
        if (!fs::exists(manifest_path)) {
            return fmt::format("{}: no {} (it was not finished)", folder, kManifestFile);
        }
        const nlohmann::json manifest = read_json(manifest_path);
        if (manifest.value("version", std::int64_t{0}) != kVersion) {
            return fmt::format("{}: not version {}", manifest_path, kVersion);
        }
        const nlohmann::json files = manifest.value("files", nlohmann::json::object());
        for (const char* needed : {kModelFile, kOptimizerFile, kStateFile}) {
            if (!files.contains(needed)) {
                return fmt::format("{}: does not list {}", manifest_path, needed);
            }
        }
        for (const auto& [name, expected] : files.items()) {
            const std::string path = (fs::path(folder) / name).string();
            const FileSum sum = sum_file(path);
            if (sum.size_bytes != expected.value("bytes", std::uint64_t{0})) {
                return fmt::format("{}: {} bytes, the manifest says {}", path, sum.size_bytes,
                                   expected.value("bytes", std::uint64_t{0}));
            }
            if (sum.fnv1a64 != expected.value("fnv1a64", std::uint64_t{0})) {
                return fmt::format("{}: its checksum is not the manifest's", path);
            }
        }
    } catch (const std::exception& error) {  // unreadable, or JSON of the wrong types
        return fmt::format("{}: {}", folder, error.what());
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

std::int64_t set_checkpoints_aside(const std::string& dir) {
    const auto found = list_checkpoints(dir);
    for (const auto& [step, folder] : found) {
        const fs::path aside = fs::path(dir) / ("replaced-" + fs::path(folder).filename().string());
        with_files("rename " + folder, [&, source = fs::path(folder)] {
            fs::remove_all(aside);
            fs::rename(source, aside);
        });
    }
    return static_cast<std::int64_t>(found.size());
}

TrainState load_checkpoint(const std::string& folder, const HybridModel& model, AdamW& optimizer) {
    const SafetensorsFile values((fs::path(folder) / kModelFile).string());
    const SafetensorsFile moments((fs::path(folder) / kOptimizerFile).string());
    refuse_surplus(values, model);
    for (std::size_t i = 0; i < model.parameters().size(); ++i) {
        const NamedParameter& parameter = model.parameters()[i];
        read_into(values, parameter.name, parameter.value);
        read_into(moments, "exp_avg." + parameter.name, optimizer.exp_avg()[i]);
        read_into(moments, "exp_avg_sq." + parameter.name, optimizer.exp_avg_sq()[i]);
    }
    const std::string state_path = (fs::path(folder) / kStateFile).string();
    try {
        const nlohmann::json value = read_json(state_path);
        TrainState state{.step = value.at("step"),
                         .consumed_rows = value.at("consumed_rows"),
                         .seed = value.at("seed"),
                         .data_fingerprint = value.at("data_fingerprint"),
                         .recipe_hash = value.at("recipe_hash")};
        optimizer.set_num_updates(state.step);
        return state;
    } catch (const nlohmann::json::exception& error) {
        throw FormatError(fmt::format("{}: {}", state_path, error.what()));
    }
}

}  // namespace hybridcp
