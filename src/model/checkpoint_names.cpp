#include "model/checkpoint_names.h"

#include <fmt/format.h>

#include <charconv>

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

void append_feed_forward(Shapes& shapes, const ModelConfig& config, std::int64_t layer) {
    const std::int64_t d = config.hidden_size;
    const auto add = [&](const std::string& suffix, std::vector<std::int64_t> shape) {
        shapes.push_back({layer_parameter_name(layer, "mlp." + suffix), std::move(shape)});
    };
    const auto add_swiglu = [&](const std::string& prefix, std::int64_t width) {
        add(prefix + "gate_proj.weight", {width, d});
        add(prefix + "up_proj.weight", {width, d});
        add(prefix + "down_proj.weight", {d, width});
    };
    if (!config.has_experts()) {
        add_swiglu("", config.intermediate_size);
        return;
    }
    add("gate.weight", {config.num_experts, d});
    add("experts.gate_up_proj", {config.num_experts, 2 * config.moe_intermediate_size, d});
    add("experts.down_proj", {config.num_experts, d, config.moe_intermediate_size});
    add_swiglu("shared_expert.", config.shared_expert_intermediate_size);
    add("shared_expert_gate.weight", {1, d});
}

const char* part_suffix(ExpertPart part) {
    return part == ExpertPart::kGate ? "gate_proj.weight"
           : part == ExpertPart::kUp ? "up_proj.weight"
                                     : "down_proj.weight";
}

/// `...mlp.experts.E.up_proj.weight` -> the fused parameter and where in it; nothing for another
/// name.
std::optional<CheckpointName> parse_single_expert(const std::string& parameter) {
    constexpr std::string_view kExperts = ".mlp.experts.";
    const std::size_t found = parameter.find(kExperts);
    if (found == std::string::npos) {
        return std::nullopt;
    }
    const std::string stem = parameter.substr(0, found + kExperts.size());
    const char* begin = parameter.data() + stem.size();
    std::int64_t expert = 0;
    const auto [end, error] = std::from_chars(begin, parameter.data() + parameter.size(), expert);
    const std::string rest(end, parameter.data() + parameter.size());
    // The number as it would be written: no sign, no leading zero.
    if (error != std::errc{} || expert < 0 || std::to_string(expert) != std::string(begin, end)) {
        return std::nullopt;
    }
    for (const ExpertPart part : {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown}) {
        if (rest == fmt::format(".{}", part_suffix(part))) {
            const bool is_down = part == ExpertPart::kDown;
            return CheckpointName{.part = CheckpointPart::kText,
                                  .parameter = stem + (is_down ? "down_proj" : "gate_up_proj"),
                                  .expert = ExpertPiece{expert, part}};
        }
    }
    return std::nullopt;
}

}  // namespace

std::string single_expert_name(const std::string& parameter, const ExpertPiece& piece) {
    return fmt::format("{}.{}.{}", parameter.substr(0, parameter.rfind('.')), piece.expert,
                       part_suffix(piece.part));
}

CheckpointName parse_checkpoint_name(const std::string& name) {
    constexpr std::string_view kMultimodalPrefix = "model.language_model.";
    if (name.starts_with("model.visual.")) {
        return {.part = CheckpointPart::kVision};
    }
    if (name.starts_with("mtp.")) {
        return {.part = CheckpointPart::kMultiTokenPrediction};
    }
    const std::string parameter = name.starts_with(kMultimodalPrefix)
                                      ? "model." + name.substr(kMultimodalPrefix.size())
                                      : name;
    const std::optional<CheckpointName> single = parse_single_expert(parameter);
    return single ? *single : CheckpointName{.parameter = parameter};
}

std::string layer_parameter_name(std::int64_t layer, const std::string& suffix) {
    return fmt::format("model.layers.{}.{}", layer, suffix);
}

std::optional<std::int64_t> layer_of_parameter(const std::string& name) {
    constexpr std::string_view prefix = "model.layers.";
    std::int64_t layer = 0;
    const char* begin = name.data() + prefix.size();
    if (!name.starts_with(prefix) ||
        std::from_chars(begin, name.data() + name.size(), layer).ec != std::errc{}) {
        return std::nullopt;
    }
    return layer;
}

std::vector<ParameterShape> parameter_shapes(const ModelConfig& config) {
    const std::int64_t d = config.hidden_size;
    Shapes shapes{{kEmbeddingName, {config.vocab_size, d}}};
    for (std::int64_t layer = 0; layer < config.num_layers(); ++layer) {
        shapes.push_back({layer_parameter_name(layer, "input_layernorm.weight"), {d}});
        if (config.layer_types[static_cast<std::size_t>(layer)] == LayerType::kLinearAttention) {
            append_linear_attention(shapes, config, layer);
        } else {
            append_full_attention(shapes, config, layer);
        }
        shapes.push_back({layer_parameter_name(layer, "post_attention_layernorm.weight"), {d}});
        append_feed_forward(shapes, config, layer);
    }
    shapes.push_back({kFinalNormName, {d}});
    if (!config.tie_word_embeddings) {
        shapes.push_back({kHeadName, {config.vocab_size, d}});
    }
    return shapes;
}

}  // namespace hybridcp
