#include "model/checkpoint_names.h"

#include <fmt/format.h>

#include "hybridcp/model.h"

namespace hybridcp {

namespace {

using Shapes = std::vector<ParameterShape>;

void append_linear_attention(Shapes& shapes, const ModelConfig& config, std::int64_t layer) {
    const std::int64_t d = config.hidden_size;
    const std::int64_t value_heads = config.linear_num_value_heads;
    const std::int64_t value_dim = value_heads * config.linear_value_head_dim;
    const std::int64_t channels = config.conv_channels();
    const auto add = [&](const char* suffix, std::vector<std::int64_t> shape) {
        const std::string name = fmt::format("linear_attn.{}", suffix);
        shapes.push_back({layer_parameter_name(layer, name), std::move(shape)});
    };
    add("in_proj_qkv.weight", {channels, d});
    add("in_proj_z.weight", {value_dim, d});
    add("in_proj_b.weight", {value_heads, d});
    add("in_proj_a.weight", {value_heads, d});
    add("conv1d.weight", {channels, 1, config.linear_conv_kernel_dim});
    add("A_log", {value_heads});
    add("dt_bias", {value_heads});
    add("norm.weight", {config.linear_value_head_dim});
    add("out_proj.weight", {d, value_dim});
}

void append_full_attention(Shapes& shapes, const ModelConfig& config, std::int64_t layer) {
    const std::int64_t d = config.hidden_size;
    const std::int64_t query_dim = config.num_attention_heads * config.head_dim;
    const std::int64_t kv_dim = config.num_key_value_heads * config.head_dim;
    const auto add = [&](const char* suffix, std::vector<std::int64_t> shape) {
        const std::string name = fmt::format("self_attn.{}.weight", suffix);
        shapes.push_back({layer_parameter_name(layer, name), std::move(shape)});
    };
    add("q_proj", {2 * query_dim, d});  // query and output gate
    add("k_proj", {kv_dim, d});
    add("v_proj", {kv_dim, d});
    add("o_proj", {d, query_dim});
    add("q_norm", {config.head_dim});
    add("k_norm", {config.head_dim});
}

}  // namespace

CheckpointName parse_checkpoint_name(const std::string& name) {
    constexpr std::string_view kMultimodalPrefix = "model.language_model.";
    if (name.starts_with("model.visual.")) {
        return {CheckpointPart::kVision, ""};
    }
    if (name.starts_with("mtp.")) {
        return {CheckpointPart::kMultiTokenPrediction, ""};
    }
    if (name.starts_with(kMultimodalPrefix)) {
        return {CheckpointPart::kText, "model." + name.substr(kMultimodalPrefix.size())};
    }
    return {CheckpointPart::kText, name};
}

std::string layer_parameter_name(std::int64_t layer, const std::string& suffix) {
    return fmt::format("model.layers.{}.{}", layer, suffix);
}

std::vector<ParameterShape> parameter_shapes(const ModelConfig& config) {
    const std::int64_t d = config.hidden_size;
    const std::int64_t ffn = config.intermediate_size;
    Shapes shapes{{kEmbeddingName, {config.vocab_size, d}}};
    for (std::int64_t layer = 0; layer < config.num_layers(); ++layer) {
        shapes.push_back({layer_parameter_name(layer, "input_layernorm.weight"), {d}});
        if (config.layer_types[static_cast<std::size_t>(layer)] == LayerType::kLinearAttention) {
            append_linear_attention(shapes, config, layer);
        } else {
            append_full_attention(shapes, config, layer);
        }
        shapes.push_back({layer_parameter_name(layer, "post_attention_layernorm.weight"), {d}});
        shapes.push_back({layer_parameter_name(layer, "mlp.gate_proj.weight"), {ffn, d}});
        shapes.push_back({layer_parameter_name(layer, "mlp.up_proj.weight"), {ffn, d}});
        shapes.push_back({layer_parameter_name(layer, "mlp.down_proj.weight"), {d, ffn}});
    }
    shapes.push_back({kFinalNormName, {d}});
    if (!config.tie_word_embeddings) {
        shapes.push_back({kHeadName, {config.vocab_size, d}});
    }
    return shapes;
}

}  // namespace hybridcp
