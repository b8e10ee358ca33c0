#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "core/files.h"
#include "hybridcp/error.h"
#include "hybridcp/model.h"
#include "model/checkpoint_names.h"
#include "model/parameter_source.h"
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

/// Where one parameter is stored: whole, or (experts) in pieces.
struct Sources {
    std::optional<Location> whole = std::nullopt;
    std::map<std::pair<std::int64_t, ExpertPart>, Location> pieces = {};

    /// False when it, or that piece of it, has a source already.
    bool add(const CheckpointName& name, const Location& location) {
        if (whole || (!name.expert && !pieces.empty())) {
            return false;
        }
        if (name.expert) {
            return pieces.emplace(std::pair(name.expert->expert, name.expert->part), location)
                .second;
        }
        whole = location;
        return true;
    }
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
std::map<std::string, Sources> locate_parameters(const Files& files,
                                                 const ModelConfig& config,
                                                 ModelConfig folder_config,
                                                 SkippedCounts& skipped) {
    const std::set<std::string> wanted = parameter_names(config);
    folder_config.tie_word_embeddings = false;  // some exports store the tied head too
    const std::set<std::string> known = parameter_names(folder_config);
    std::map<std::string, Sources> located;
    for (const auto& file : files) {
        for (const auto& [stored_name, entry] : file->entries()) {
            const CheckpointName name = parse_checkpoint_name(stored_name);
            const bool is_surplus_expert =
                name.expert && name.expert->expert >= folder_config.num_experts;
            if (name.part == CheckpointPart::kVision) {
                ++skipped.vision;
            } else if (name.part == CheckpointPart::kMultiTokenPrediction) {
                ++skipped.multi_token_prediction;
            } else if (!is_surplus_expert && wanted.count(name.parameter) != 0) {
                if (!located[name.parameter].add(name, {file.get(), stored_name})) {
                    throw FormatError(fmt::format("{}: parameter {} is stored twice", file->path(),
                                                  name.parameter));
                }
            } else if (!is_surplus_expert && known.count(name.parameter) != 0) {
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

/// Errors: FormatError for another shape or no floating-point dtype.
void check_tensor(const Location& location, const std::vector<std::int64_t>& shape) {
    const SafetensorsFile::Entry& entry = location.file->entries().at(location.stored_name);
    const std::string where =
        fmt::format("{}: tensor {}", location.file->path(), location.stored_name);
    if (entry.shape != shape) {
        throw FormatError(fmt::format("{} has shape [{}], the configuration needs [{}]", where,
                                      fmt::join(entry.shape, ", "), fmt::join(shape, ", ")));
    }
    if (!at::isFloatingType(entry.dtype)) {
        throw FormatError(fmt::format("{} has dtype {}, a parameter needs a floating-point one",
                                      where, at::toString(entry.dtype)));
    }
}

[[noreturn]] void fail_on_missing(const std::string& folder,
                                  const std::string& name,
                                  const std::vector<std::int64_t>& shape) {
    throw FormatError(fmt::format("{}: tensor {} [{}] is missing from the weights", folder, name,
                                  fmt::join(shape, ", ")));
}

/// A run of a fused parameter of the experts from its pieces: of each expert gate rows first, then
/// up rows.
void read_pieces(const std::string& folder,
                 const Sources& sources,
                 const ParameterShape& fused,
                 std::int64_t begin,
                 const at::Tensor& into) {
    const bool is_down = sources.pieces.begin()->first.second == ExpertPart::kDown;
    const std::vector<ExpertPart> parts =
        is_down ? std::vector{ExpertPart::kDown} : std::vector{ExpertPart::kGate, ExpertPart::kUp};
    const auto num_parts = static_cast<std::int64_t>(parts.size());
    const std::vector<std::int64_t> shape{fused.shape[1] / num_parts, fused.shape[2]};
    const std::int64_t count = shape[0] * shape[1];
    const std::int64_t end = begin + into.numel();
    for (std::int64_t piece = begin / count; piece * count < end; ++piece) {
        const std::int64_t expert = piece / num_parts;
        const ExpertPart part = parts[static_cast<std::size_t>(piece % num_parts)];
        const auto found = sources.pieces.find({expert, part});
        if (found == sources.pieces.end()) {
            fail_on_missing(folder, single_expert_name(fused.name, {expert, part}), shape);
        }
        check_tensor(found->second, shape);
        const std::int64_t first = std::max(begin, piece * count);
        const std::int64_t last = std::min(end, (piece + 1) * count);
        found->second.file->read_run(found->second.stored_name, first - piece * count,
                                     into.narrow(0, first - begin, last - first));
    }
}

class StoredParameters final : public ParameterSource {
  public:
    StoredParameters(const std::string& folder, const ModelConfig& config, std::string* skipped)
        : folder_(folder) {
        const ModelConfig folder_config = read_model_config(folder);
        files_ = open_weights(folder);
        SkippedCounts counts;
        located_ = locate_parameters(files_, config, folder_config, counts);
        if (skipped != nullptr) {
            *skipped = counts.line();
        }
    }

    void read(const ParameterShape& parameter,
              std::int64_t begin,
              const at::Tensor& into) const override {
        const auto found = located_.find(parameter.name);
        if (found == located_.end()) {
            fail_on_missing(folder_, parameter.name, parameter.shape);
        }
        const Sources& sources = found->second;
        if (sources.whole) {
            check_tensor(*sources.whole, parameter.shape);
            sources.whole->file->read_run(sources.whole->stored_name, begin, into);
        } else {
            read_pieces(folder_, sources, parameter, begin, into);
        }
    }

  private:
    std::string folder_;
    Files files_;
    std::map<std::string, Sources> located_;
};

}  // namespace

std::unique_ptr<ParameterSource> stored_parameters(const std::string& folder,
                                                   const ModelConfig& config,
                                                   std::string* skipped) {
    return std::make_unique<StoredParameters>(folder, config, skipped);
}

std::vector<NamedParameter> load_parameters(const std::string& folder,
                                            const ModelConfig& config,
                                            const at::Device& device,
                                            std::string* skipped) {
    return read_parameters(*stored_parameters(folder, config, skipped), config, device);
}

}  // namespace hybridcp
