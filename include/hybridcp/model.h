// The text tower of the dense Qwen3.5 family: configuration, parameters under their Hugging Face
// names, forward pass over the local tokens of a batch. See docs/model.md; the formulas are the
// public model's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "hybridcp/parallel.h"

namespace hybridcp {

struct CpContext;     // ops/context_parallel.h
struct Sharded;       // ops/sharded.h
struct RotaryTables;  // kernels/rotary/rotary.h

enum class LayerType { kLinearAttention, kFullAttention };

struct ModelConfig {
    std::int64_t vocab_size = 0;
    std::int64_t hidden_size = 0;
    std::int64_t intermediate_size = 0;
    std::vector<LayerType> layer_types;  // one per layer
    std::int64_t num_attention_heads = 0;
    std::int64_t num_key_value_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t linear_num_key_heads = 0;
    std::int64_t linear_num_value_heads = 0;
    std::int64_t linear_key_head_dim = 0;
    std::int64_t linear_value_head_dim = 0;
    std::int64_t linear_conv_kernel_dim = 4;
    std::int64_t max_position_embeddings = 262144;
    double rms_norm_eps = 1e-6;
    double rope_theta = 1e7;
    double partial_rotary_factor = 0.25;
    double initializer_range = 0.02;
    bool tie_word_embeddings = false;

    [[nodiscard]] std::int64_t num_layers() const {
        return static_cast<std::int64_t>(layer_types.size());
    }
    [[nodiscard]] std::int64_t conv_channels() const;
    [[nodiscard]] std::int64_t rotary_dim() const;
    [[nodiscard]] HeadCounts head_counts() const;
};

/// Reads config.json of a Hugging Face folder: flat or under text_config; layer_types or
/// full_attention_interval; rope values flat or under rope_parameters. Errors: FormatError naming
/// file and key; UsageError for a mixture of experts (not built yet) or a feature that changes the
/// numbers and is not supported (attention_bias, another activation or rope type).
[[nodiscard]] ModelConfig read_model_config(const std::string& folder);
/// Writes config.json so that Transformers loads the folder as Qwen3_5ForCausalLM; dtype is that of
/// the weights beside it (kFloat or kBFloat16).
void write_model_config(const ModelConfig& config,
                        const std::string& folder,
                        at::ScalarType dtype = at::kFloat);
/// tiny, qwen3_5-0.8b, -2b, -4b, -9b, -27b. Errors: UsageError naming the nearest preset.
[[nodiscard]] ModelConfig preset_model_config(const std::string& name);
/// The first `num_layers` layers. Errors: UsageError when there are fewer.
[[nodiscard]] ModelConfig with_num_layers(ModelConfig config, std::int64_t num_layers);

struct NamedParameter {
    std::string name;  // Hugging Face's, prefix `model.`
    at::Tensor value;  // fp32 leaf that requires grad
};

/// Name and shape of every parameter of a configuration, in layer order; no lm_head.weight when
/// tied.
struct ParameterShape {
    std::string name;
    std::vector<std::int64_t> shape;
};
[[nodiscard]] std::vector<ParameterShape> parameter_shapes(const ModelConfig& config);

struct ForwardResult {
    at::Tensor hidden;                  // [T, d] after the final norm
    std::vector<at::Tensor> per_layer;  // [T, d] output of each layer, detached, when asked for
};

/// The first layer whose output (per_layer) holds a value that is not finite; nothing when all are.
[[nodiscard]] std::optional<std::int64_t> first_non_finite_layer(const ForwardResult& result);

class HybridModel {
  public:
    /// Parameters of the given names, in parameter_shapes order. compute_dtype: kFloat or kBFloat16
    /// (kDouble in tests).
    HybridModel(ModelConfig config,
                std::vector<NamedParameter> parameters,
                at::ScalarType compute_dtype);
    /// Random initialisation as Hugging Face does it, the same on every rank for the same seed.
    [[nodiscard]] static HybridModel random(const ModelConfig& config,
                                            std::uint64_t seed,
                                            at::ScalarType compute_dtype,
                                            const at::Device& device);

    [[nodiscard]] const ModelConfig& config() const { return config_; }
    [[nodiscard]] at::ScalarType compute_dtype() const { return compute_dtype_; }
    [[nodiscard]] const std::vector<NamedParameter>& parameters() const { return parameters_; }
    [[nodiscard]] const at::Tensor& parameter(const std::string& name) const;
    /// lm_head.weight, or the embedding when tied, in fp32. [vocabulary, d]
    [[nodiscard]] at::Tensor head_weight() const;

    /// token_ids: [T] int64, the local tokens in the plan's local order.
    [[nodiscard]] ForwardResult forward(const at::Tensor& token_ids,
                                        const CpContext& context,
                                        bool keep_per_layer = false) const;
    std::int64_t gdn_chunk_size = 64;

  private:
    // The mixers of a layer, in the layout of x, which is that of the context's plan.
    Sharded linear_attention(const Sharded& x, std::int64_t layer, const CpContext& context) const;
    Sharded linear_mixer(const Sharded& x, std::int64_t layer, const CpContext& context) const;
    Sharded full_attention(const Sharded& x,
                           std::int64_t layer,
                           const RotaryTables& rotary,
                           const CpContext& context) const;
    at::Tensor weight(std::int64_t layer, const std::string& suffix) const;  // in the compute dtype
    at::Tensor exact_weight(const std::string& name) const;  // in fp32 (fp64 in fp64)

    ModelConfig config_;
    std::vector<NamedParameter> parameters_;
    std::unordered_map<std::string, std::size_t> index_by_name_;
    at::ScalarType compute_dtype_;
};

/// Loads the parameters of a Hugging Face folder (one file or shards with
/// model.safetensors.index.json; names with prefix `model.` or `model.language_model.`; bf16 or
/// fp32), as fp32 leaves. Vision and multi-token-prediction tensors are skipped, and so are those
/// of the folder's own configuration that `config` does not have (layers beyond its last,
/// lm_head.weight when tied); their number goes to `skipped` (a line for the user, empty for none).
/// Errors: FormatError naming the tensor (missing, surplus, of another shape or dtype) or the
/// truncated file.
[[nodiscard]] std::vector<NamedParameter> load_parameters(const std::string& folder,
                                                          const ModelConfig& config,
                                                          const at::Device& device,
                                                          std::string* skipped = nullptr);
/// Saves config.json and model.safetensors (dtype: kFloat or kBFloat16; A_log, dt_bias and norms
/// stay fp32) so that Transformers loads them; weights beyond max_shard_bytes are split in shards
/// with an index. Files are complete or absent: written under temporary names, synced, renamed.
/// Errors: UsageError for another dtype; FormatError naming the path and the system's reason.
void save_model(const HybridModel& model,
                const std::string& folder,
                at::ScalarType dtype,
                std::int64_t max_shard_bytes = 5'000'000'000);

}  // namespace hybridcp
