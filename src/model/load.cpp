#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "core/files.h"
#include "hybridcp/error.h"
#include "hybridcp/model.h"
#include "model/checkpoint_names.h"
#include "model/safetensors.h"

namespace hybridcp {

namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

using Files = std::vector<std::unique_ptr<SafetensorsFile>>;

/// Tensor name -> name of the file that holds it.
std::map<std::string, std::string> read_index(const std::string& path) {
    try {
        const auto json = nlohmann::json::parse(read_file(path));
        return json.at("weight_map").get<std::map<std::string, std::string>>();
    } catch (const nlohmann::json::exception& error) {
        throw FormatError(fmt::format("{}: not a valid index of shards ({})", path, error.what()));
    }
}

Files open_shards(const std::string& folder) {
    const std::string index_path = fmt::format("{}/{}", folder, kIndexFile);
    const auto file_of_tensor = read_index(index_path);
    std::map<std::string, const SafetensorsFile*> opened;
    Files files;
    for (const auto& [tensor, file_name] : file_of_tensor) {
        const std::string path = fmt::format("{}/{}", folder, file_name);
        if (opened.count(file_name) == 0) {
            if (!std::filesystem::exists(path)) {
                throw FormatError(
                    fmt::format("{}: shard {} is missing from the folder (it holds {})", index_path,
                                file_name, tensor));
            }
            files.push_back(std::make_unique<SafetensorsFile>(path));
            opened.emplace(file_name, files.back().get());
        }
        if (!opened.at(file_name)->contains(tensor)) {
            throw FormatError(fmt::format("{}: tensor {} is not in {}, where the index says",
                                          index_path, tensor, path));
        }
    }
    for (const auto& file : files) {
        for (const auto& [tensor, entry] : file->entries()) {
            if (file_of_tensor.count(tensor) == 0) {
                throw FormatError(
                    fmt::format("{}: tensor {} is not in {}", file->path(), tensor, kIndexFile));
            }
        }
    }
    return files;
}

/// As Transformers does, a single file goes before an index.
Files open_weights(const std::string& folder) {
    const std::string single_path = fmt::format("{}/{}", folder, kSingleFile);
    if (std::filesystem::exists(single_path)) {
        Files files;
        files.push_back(std::make_unique<SafetensorsFile>(single_path));
        return files;
    }
    if (!std::filesystem::exists(fmt::format("{}/{}", folder, kIndexFile))) {
        throw FormatError(
            fmt::format("{}: has neither {} nor {}", folder, kSingleFile, kIndexFile));
    }
    return open_shards(folder);
}

struct Location {
    const SafetensorsFile* file = nullptr;
    std::string stored_name;
};

struct SkippedCounts {
    std::int64_t vision = 0;
    std::int64_t multi_token_prediction = 0;
    std::int64_t unused = 0;  // of the folder's configuration, not of the one asked for

    [[nodiscard]] std::string line() const {
        std::vector<std::string> parts;
        const auto add = [&](std::int64_t count, const char* what) {
            if (count > 0) {
                parts.push_back(fmt::format("{} {}", count, what));
            }
        };
        add(vision, "vision");
        add(multi_token_prediction, "multi-token-prediction");
        add(unused, "unused");
        return parts.empty() ? "" : fmt::format("skipped {} tensors", fmt::join(parts, " and "));
    }
};

std::set<std::string> parameter_names(const ModelConfig& config) {
    std::set<std::string> names;
    for (ParameterShape& parameter : parameter_shapes(config)) {
        names.insert(std::move(parameter.name));
    }
    return names;
}

/// Where each parameter of `config` is stored. Errors: FormatError for a surplus or repeated
/// tensor.
std::map<std::string, Location> locate_parameters(const Files& files,
                                                  const ModelConfig& config,
                                                  ModelConfig folder_config,
                                                  SkippedCounts& skipped) {
    const std::set<std::string> wanted = parameter_names(config);
    folder_config.tie_word_embeddings = false;  // some exports store the tied head too
    const std::set<std::string> known = parameter_names(folder_config);
    std::map<std::string, Location> located;
    for (const auto& file : files) {
        for (const auto& [stored_name, entry] : file->entries()) {
            const CheckpointName name = parse_checkpoint_name(stored_name);
            if (name.part == CheckpointPart::kVision) {
                ++skipped.vision;
            } else if (name.part == CheckpointPart::kMultiTokenPrediction) {
                ++skipped.multi_token_prediction;
            } else if (wanted.count(name.parameter) != 0) {
                if (!located.emplace(name.parameter, Location{file.get(), stored_name}).second) {
                    throw FormatError(fmt::format("{}: parameter {} is stored twice", file->path(),
                                                  name.parameter));
                }
            } else if (known.count(name.parameter) != 0) {
                ++skipped.unused;
            } else {
                throw FormatError(
                    fmt::format("{}: surplus tensor {}: the configuration has no such "
                                "parameter",
                                file->path(), stored_name));
            }
        }
    }
    return located;
}

at::Tensor read_parameter(const Location& location,
                          const ParameterShape& expected,
                          const at::Device& device) {
    const SafetensorsFile::Entry& entry = location.file->entries().at(location.stored_name);
    const std::string where =
        fmt::format("{}: tensor {}", location.file->path(), location.stored_name);
    if (entry.shape != expected.shape) {
        throw FormatError(fmt::format("{} has shape [{}], the configuration needs [{}]", where,
                                      fmt::join(entry.shape, ", "),
                                      fmt::join(expected.shape, ", ")));
    }
    if (!at::isFloatingType(entry.dtype)) {
        throw FormatError(fmt::format("{} has dtype {}, a parameter needs a floating-point one",
                                      where, at::toString(entry.dtype)));
    }
    return location.file->read(location.stored_name).to(at::kFloat).to(device).requires_grad_(true);
}

}  // namespace

std::vector<NamedParameter> load_parameters(const std::string& folder,
                                            const ModelConfig& config,
                                            const at::Device& device,
                                            std::string* skipped) {
    const ModelConfig folder_config = read_model_config(folder);
    const Files files = open_weights(folder);
    SkippedCounts counts;
    const auto located = locate_parameters(files, config, folder_config, counts);
    std::vector<NamedParameter> parameters;
    for (const ParameterShape& expected : parameter_shapes(config)) {
        const auto found = located.find(expected.name);
        if (found == located.end()) {
            throw FormatError(fmt::format("{}: tensor {} [{}] is missing from the weights", folder,
                                          expected.name, fmt::join(expected.shape, ", ")));
        }
        parameters.push_back({expected.name, read_parameter(found->second, expected, device)});
    }
    if (skipped != nullptr) {
        *skipped = counts.line();
    }
    return parameters;
}

}  // namespace hybridcp
