#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/files.h"
#include "hybridcp/error.h"
#include "hybridcp/model.h"
#include "model/safetensors.h"

namespace hybridcp {

namespace {

using Tensors = std::vector<std::pair<std::string, at::Tensor>>;

// The gate and the norms are computed in fp32, so rounding their weights would change the model.
at::ScalarType stored_dtype(const std::string& name, at::ScalarType dtype) {
    const bool keeps_fp32 =
        name.ends_with(".A_log") || name.ends_with(".dt_bias") || name.ends_with("norm.weight");
    return keeps_fp32 ? at::kFloat : dtype;
}

std::int64_t stored_bytes(const NamedParameter& parameter, at::ScalarType dtype) {
    return parameter.value.numel() *
           static_cast<std::int64_t>(at::elementSize(stored_dtype(parameter.name, dtype)));
}

struct Shard {
    std::size_t begin = 0;  // parameters [begin, end)
    std::size_t end = 0;
};

/// Cuts the parameters, in order, where the next one would exceed the limit.
std::vector<Shard> cut_shards(const std::vector<NamedParameter>& parameters,
                              at::ScalarType dtype,
                              std::int64_t max_shard_bytes) {
    std::vector<Shard> shards{{0, 0}};
    std::int64_t shard_bytes = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const std::int64_t size_bytes = stored_bytes(parameters[i], dtype);
        if (i > shards.back().begin && shard_bytes + size_bytes > max_shard_bytes) {
            shards.push_back({i, i});
            shard_bytes = 0;
        }
        shard_bytes += size_bytes;
        shards.back().end = i + 1;
    }
    return shards;
}

void write_shard(const std::string& path,
                 const std::vector<NamedParameter>& parameters,
                 Shard shard,
                 at::ScalarType dtype) {
    Tensors tensors;
    for (std::size_t i = shard.begin; i < shard.end; ++i) {
        const NamedParameter& parameter = parameters[i];
        tensors.emplace_back(parameter.name,
                             parameter.value.detach().to(stored_dtype(parameter.name, dtype)));
    }
    write_safetensors(path, tensors, {{"format", "pt"}});
}

void write_sharded(const std::string& folder,
                   const std::vector<NamedParameter>& parameters,
                   const std::vector<Shard>& shards,
                   at::ScalarType dtype) {
    nlohmann::json weight_map = nlohmann::json::object();
    std::int64_t total_bytes = 0;
    std::int64_t total_parameters = 0;
    for (std::size_t number = 0; number < shards.size(); ++number) {
        const std::string name =
            fmt::format("model-{:05}-of-{:05}.safetensors", number + 1, shards.size());
        write_shard(fmt::format("{}/{}", folder, name), parameters, shards[number], dtype);
        for (std::size_t i = shards[number].begin; i < shards[number].end; ++i) {
            weight_map[parameters[i].name] = name;
            total_bytes += stored_bytes(parameters[i], dtype);
            total_parameters += parameters[i].value.numel();
        }
    }
    const nlohmann::json index{
        {"metadata", {{"total_size", total_bytes}, {"total_parameters", total_parameters}}},
        {"weight_map", weight_map}};
    write_file_atomically(folder + "/model.safetensors.index.json", index.dump(2) + "\n");
}

}  // namespace

void save_model(const HybridModel& model,
                const std::string& folder,
                at::ScalarType dtype,
                std::int64_t max_shard_bytes) {
    if (dtype != at::kFloat && dtype != at::kBFloat16) {
        throw UsageError(fmt::format("a model cannot be saved as {}: choose float32 or bfloat16",
                                     at::toString(dtype)));
    }
    std::error_code failure;
    std::filesystem::create_directories(folder, failure);
    if (failure) {
        throw FormatError(fmt::format("cannot create {}: {}", folder, failure.message()));
    }
    const std::vector<Shard> shards = cut_shards(model.parameters(), dtype, max_shard_bytes);
    const std::string single_path = folder + "/model.safetensors";
    if (shards.size() == 1) {
        write_shard(single_path, model.parameters(), shards[0], dtype);
        std::filesystem::remove(folder + "/model.safetensors.index.json", failure);
    } else {
        write_sharded(folder, model.parameters(), shards, dtype);
        // One of an earlier save would be read instead of the shards.
        std::filesystem::remove(single_path, failure);
    }
    write_model_config(model.config(), folder, dtype);
}

}  // namespace hybridcp
