// The configuration of a model of the Qwen3.5 family, dense or with a mixture of experts:
// config.json and presets, and the parameters that follow from it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "hybridcp/parallel.h"

namespace hybridcp {

enum class LayerType { kLinearAttention, kFullAttention };

struct ModelConfig {
    std::int64_t vocab_size = 0;
    std::int64_t hidden_size = 0;
    std::int64_t intermediate_size = 0;  // of the dense feed-forward; 0 with experts
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
    // A mixture of experts in every layer, with one shared expert; all 0 in a dense model.
    std::int64_t num_experts = 0;
    std::int64_t num_experts_per_tok = 0;
    std::int64_t moe_intermediate_size = 0;
    std::int64_t shared_expert_intermediate_size = 0;
    double router_aux_loss_coef = 0.0;  // weight of the load-balancing loss in training

    [[nodiscard]] bool has_experts() const { return num_experts > 0; }
    [[nodiscard]] std::int64_t num_layers() const {
        return static_cast<std::int64_t>(layer_types.size());
    }
    [[nodiscard]] std::int64_t conv_channels() const;
    [[nodiscard]] std::int64_t rotary_dim() const;
    [[nodiscard]] HeadCounts head_counts() const;
};

/// Reads config.json of a Hugging Face folder: flat or under text_config; layer_types or
/// full_attention_interval; rope values flat or under rope_parameters. Errors: FormatError naming
/// file and key; UsageError for a feature that changes the numbers and is not supported
/// (attention_bias, another activation or rope type, dense layers between those with experts).
[[nodiscard]] ModelConfig read_model_config(const std::string& folder);
/// Writes config.json so that Transformers loads the folder as Qwen3_5ForCausalLM or
/// Qwen3_5MoeForCausalLM; dtype is that of the weights beside it (kFloat or kBFloat16).
void write_model_config(const ModelConfig& config,
                        const std::string& folder,
                        at::ScalarType dtype = at::kFloat);
/// tiny, tiny-linear, tiny-moe, qwen3_5-0.8b, -2b, -4b, -9b, -27b, -35b-a3b, -122b-a10b,
/// -397b-a17b. Errors: UsageError naming the nearest preset.
[[nodiscard]] ModelConfig preset_model_config(const std::string& name);
/// The first `num_layers` layers. Errors: UsageError when there are fewer.
[[nodiscard]] ModelConfig with_num_layers(ModelConfig config, std::int64_t num_layers);

/// Name and shape of every parameter of a configuration, in layer order; no lm_head.weight when
/// tied.
struct ParameterShape {
    std::string name;
    std::vector<std::int64_t> shape;
};
[[nodiscard]] std::vector<ParameterShape> parameter_shapes(const ModelConfig& config);

}  // namespace hybridcp
