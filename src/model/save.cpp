#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/files.h"
#include "hybridcp/error.h"
#include "hybridcp/model.h"
#include "model/parameter_source.h"
#include "model/safetensors.h"

namespace hybridcp {

namespace {

// The gate and the norms are computed in fp32, so rounding their weights would change the model.
at::ScalarType stored_dtype(const std::string& name, at::ScalarType dtype) {
    const bool keeps_fp32 =
        name.ends_with(".A_log") || name.ends_with(".dt_bias") || name.ends_with("norm.weight");
    return keeps_fp32 ? at::kFloat : dtype;
}

std::int64_t num_elements(const ParameterShape& parameter) {
    return std::accumulate(parameter.shape.begin(), parameter.shape.end(), std::int64_t{1},
                           std::multiplies<>());
}

std::int64_t stored_bytes(const ParameterShape& parameter, at::ScalarType dtype) {
    return num_elements(parameter) *
           static_cast<std::int64_t>(at::elementSize(stored_dtype(parameter.name, dtype)));
}

using Shard = std::vector<ParameterShape>;

/// Cuts the parameters, in order, where the next one would exceed the limit.
std::vector<Shard> cut_shards(const std::vector<ParameterShape>& parameters,
                              at::ScalarType dtype,
                              std::int64_t max_shard_bytes) {
    std::vector<Shard> shards(1);
    std::int64_t shard_bytes = 0;
    for (const ParameterShape& parameter : parameters) {
        const std::int64_t size_bytes = stored_bytes(parameter, dtype);
        if (!shards.back().empty() && shard_bytes + size_bytes > max_shard_bytes) {
            shards.emplace_back();
            shard_bytes = 0;
        }
        shard_bytes += size_bytes;
        shards.back().push_back(parameter);
    }
    return shards;
}

void write_shard(const std::string& path,
                 const ParameterSource& source,
                 const Shard& shard,
                 at::ScalarType dtype) {
    std::vector<TensorOutline> outlines;
    for (const ParameterShape& parameter : shard) {
        outlines.push_back({parameter.name, stored_dtype(parameter.name, dtype), parameter.shape});
    }
    write_safetensors(path, outlines,
                      [&](std::size_t i) {
                          return read_parameter(source, shard[i], at::kCPU).to(outlines[i].dtype);
                      },
                      {{"format", "pt"}});
}

void write_shards(const std::string& folder,
                  const ParameterSource& source,
                  const std::vector<Shard>& shards,
                  at::ScalarType dtype) {
    nlohmann::json weight_map = nlohmann::json::object();
    std::int64_t total_bytes = 0;
    std::int64_t total_parameters = 0;
    for (std::size_t number = 0; number < shards.size(); ++number) {
        const std::string name =
            fmt::format("model-{:05}-of-{:05}.safetensors", number + 1, shards.size());
        write_shard(fmt::format("{}/{}", folder, name), source, shards[number], dtype);
        for (const ParameterShape& parameter : shards[number]) {
            weight_map[parameter.name] = name;
            total_bytes += stored_bytes(parameter, dtype);
            total_parameters += num_elements(parameter);
        }
    }
    const nlohmann::json index{
        {"metadata", {{"total_size", total_bytes}, {"total_parameters", total_parameters}}},
        {"weight_map", weight_map}};
    write_file_atomically(folder + "/model.safetensors.index.json", index.dump(2) + "\n");
}

class ModelParameters final : public ParameterSource {
  public:
    explicit ModelParameters(const HybridModel& model) : model_(model) {}
    void read(const ParameterShape& parameter,
              std::int64_t begin,
              const at::Tensor& into) const override {
        const at::Tensor value = model_.parameter(parameter.name).detach();
        into.copy_(value.reshape({-1}).narrow(0, begin, into.numel()));
    }

  private:
    const HybridModel& model_;
};

}  // namespace

void save_parameters(const ParameterSource& source,
                     const ModelConfig& config,
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
    const std::vector<Shard> shards = cut_shards(parameter_shapes(config), dtype, max_shard_bytes);
    const std::string single_path = folder + "/model.safetensors";
    if (shards.size() == 1) {
        write_shard(single_path, source, shards[0], dtype);
        std::filesystem::remove(folder + "/model.safetensors.index.json", failure);
    } else {
        write_shards(folder, source, shards, dtype);
        // One of an earlier save would be read instead of the shards.
        std::filesystem::remove(single_path, failure);
    }
    write_model_config(config, folder, dtype);
}

void save_model(const HybridModel& model,
                const std::string& folder,
                at::ScalarType dtype,
                std::int64_t max_shard_bytes) {
    save_parameters(ModelParameters(model), model.config(), folder, dtype, max_shard_bytes);
}

}  // namespace hybridcp
