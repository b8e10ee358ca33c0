#include <nlohmann/json.hpp>

#include "core/files.h"
#include "hybridcp/error.h"
#include "hybridcp/model.h"

namespace hybridcp {

namespace {

using Json = nlohmann::json;

constexpr const char* kLinearName = "linear_attention";
constexpr const char* kFullName = "full_attention";
constexpr const char* kDenseType = "qwen3_5_text";
constexpr const char* kMoeType = "qwen3_5_moe_text";
constexpr std::int64_t kLargestLayerCount = 10000;  // beyond it the file is damaged

/// Typed access to one JSON object; errors name file and key. A null counts as absent, as in
/// Transformers.
class Section {
  public:
    Section(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

    [[nodiscard]] const std::string& where() const { return where_; }
    [[nodiscard]] bool has(const char* key) const {
        return object_.contains(key) && !object_.at(key).is_null();
    }
    [[nodiscard]] const Json& at(const char* key) const {
        if (!has(key)) {
            throw FormatError(fmt::format("{}: key '{}' is missing", where_, key));
        }
        return object_.at(key);
    }
    [[nodiscard]] std::int64_t positive(const char* key) const {
        const Json& value = at(key);
        if (!value.is_number_unsigned() || value.get<std::uint64_t>() == 0 ||
            value.get<std::uint64_t>() > kLargestSize) {
            fail(key, value, fmt::format("an integer from 1 to {}", kLargestSize));
        }
        return value.get<std::int64_t>();
    }
    [[nodiscard]] std::int64_t positive_or(const char* key, std::int64_t otherwise) const {
        return has(key) ? positive(key) : otherwise;
    }
    [[nodiscard]] double number(const char* key) const {
        const Json& value = at(key);
        if (!value.is_number() || !(value.get<double>() >= 0)) {
            fail(key, value, "a number >= 0");
        }
        return value.get<double>();
    }
    [[nodiscard]] double number_or(const char* key, double otherwise) const {
        return has(key) ? number(key) : otherwise;
    }
    [[nodiscard]] bool flag_or(const char* key, bool otherwise) const {
        if (has(key) && !object_.at(key).is_boolean()) {
            fail(key, object_.at(key), "true or false");
        }
        return has(key) ? object_.at(key).get<bool>() : otherwise;
    }
    [[nodiscard]] std::string text_or(const char* key, const std::string& otherwise) const {
        if (has(key) && !object_.at(key).is_string()) {
            fail(key, object_.at(key), "a string");
        }
        return has(key) ? object_.at(key).get<std::string>() : otherwise;
    }
    [[nodiscard]] Section section(const char* key) const {
        const Json& value = at(key);
        if (!value.is_object()) {
            fail(key, value, "an object");
        }
        return {value, fmt::format("{}: {}", where_, key)};
    }
    [[noreturn]] void fail(const char* key, const Json& value, const std::string& wanted) const {
        const std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
        throw FormatError(fmt::format("{}: key '{}' must be {}, got {}", where_, key, wanted,
                                      text.substr(0, 80)));
    }

  private:
    static constexpr std::uint64_t kLargestSize = std::uint64_t{1}
                                                  << 31;  // products of two fit in 64 bits
    const Json& object_;
    std::string where_;
};

/// Whether model_type is one with experts. `qwen3_5` and `qwen3_5_moe` stand in flat files.
bool is_moe_type(const Section& text) {
    return text.text_or("model_type", kDenseType).starts_with("qwen3_5_moe");
}

/// Features that change the numbers and that this model does not compute.
void refuse_unsupported(const Section& text) {
    const auto require = [&](const char* key, const std::string& value,
                             const std::string& supported) {
        if (value != supported) {
            throw UsageError(fmt::format("{}: {} '{}' is not supported, only '{}' is", text.where(),
                                         key, value, supported));
        }
    };
    const std::string model_type = text.text_or("model_type", kDenseType);
    if (is_moe_type(text)) {
        if (model_type != "qwen3_5_moe") {
            require("model_type", model_type, kMoeType);
        }
        // Keys of older classes; here every layer has experts and weights are renormalised.
        require("mlp_only_layers",
                text.has("mlp_only_layers") ? text.at("mlp_only_layers").dump() : "[]", "[]");
        require("decoder_sparse_step", fmt::format("{}", text.number_or("decoder_sparse_step", 1)),
                "1");
        require("norm_topk_prob", text.flag_or("norm_topk_prob", true) ? "true" : "false", "true");
    } else {
        if (model_type != "qwen3_5") {
            require("model_type", model_type, kDenseType);
        }
        require("num_experts (of a dense model_type)",
                fmt::format("{}", text.number_or("num_experts", 0)), "0");
    }
    require("hidden_act", text.text_or("hidden_act", "silu"), "silu");
    require("attention_bias", text.flag_or("attention_bias", false) ? "true" : "false", "false");
    require("attn_output_gate", text.flag_or("attn_output_gate", true) ? "true" : "false", "true");
    require("attention_dropout", fmt::format("{}", text.number_or("attention_dropout", 0)), "0");
}

std::vector<LayerType> read_layer_types(const Section& text) {
    const std::int64_t num_layers = text.positive("num_hidden_layers");
    if (num_layers > kLargestLayerCount) {
        text.fail("num_hidden_layers", num_layers, fmt::format("at most {}", kLargestLayerCount));
    }
    std::vector<LayerType> types;
    if (!text.has("layer_types")) {
        const std::int64_t interval = text.positive_or("full_attention_interval", 4);
        for (std::int64_t layer = 1; layer <= num_layers; ++layer) {
            types.push_back(layer % interval == 0 ? LayerType::kFullAttention
                                                  : LayerType::kLinearAttention);
        }
        return types;
    }
    const Json& names = text.at("layer_types");
    if (!names.is_array() || names.size() != static_cast<std::size_t>(num_layers)) {
        text.fail("layer_types", names,
                  fmt::format("a list of num_hidden_layers = {} names", num_layers));
    }
    for (const Json& name : names) {
        if (name != kLinearName && name != kFullName) {
            text.fail("layer_types", name,
                      fmt::format("made of {} and {}", kLinearName, kFullName));
        }
        types.push_back(name == kFullName ? LayerType::kFullAttention
                                          : LayerType::kLinearAttention);
    }
    return types;
}

/// Values are under rope_parameters (rope_scaling in older files) or flat.
void read_rope(const Section& text, ModelConfig& config) {
    for (const char* key : {"rope_parameters", "rope_scaling"}) {
        if (!text.has(key)) {
            continue;
        }
        const Section rope = text.section(key);
        const std::string type = rope.text_or("rope_type", rope.text_or("type", "default"));
        // "mrope" is how older files write it; text positions are equal on its three axes.
        if (type != "default" && type != "mrope") {
            throw UsageError(fmt::format("{}: rope_type '{}' is not supported, only 'default' is",
                                         rope.where(), type));
        }
        if (rope.has("rope_theta")) {
            config.rope_theta = rope.number("rope_theta");
            config.partial_rotary_factor = rope.number_or(
                "partial_rotary_factor", text.number_or("partial_rotary_factor", 0.25));
            return;
        }
    }
    config.rope_theta = text.number("rope_theta");
    config.partial_rotary_factor = text.number_or("partial_rotary_factor", 0.25);
}

void read_feed_forward(const Section& text, ModelConfig& config) {
    if (!is_moe_type(text)) {
        config.intermediate_size = text.positive("intermediate_size");
        return;
    }
    config.num_experts = text.positive("num_experts");
    config.num_experts_per_tok = text.positive("num_experts_per_tok");
    config.moe_intermediate_size = text.positive("moe_intermediate_size");
    config.shared_expert_intermediate_size = text.positive("shared_expert_intermediate_size");
    config.router_aux_loss_coef = text.number_or("router_aux_loss_coef", 0.001);
    if (config.num_experts_per_tok > config.num_experts) {
        text.fail("num_experts_per_tok", config.num_experts_per_tok,
                  fmt::format("at most num_experts = {}", config.num_experts));
    }
}

void check_consistent(const ModelConfig& config, const std::string& where) {
    const auto divides = [&](const char* a_name, std::int64_t a, const char* b_name,
                             std::int64_t b) {
        if (a % b != 0) {
            throw FormatError(
                fmt::format("{}: {} {} is not a multiple of {} {}", where, a_name, a, b_name, b));
        }
    };
    divides("num_attention_heads", config.num_attention_heads, "num_key_value_heads",
            config.num_key_value_heads);
    divides("linear_num_value_heads", config.linear_num_value_heads, "linear_num_key_heads",
            config.linear_num_key_heads);
    const std::int64_t rotated = config.rotary_dim();
    if (rotated < 2 || rotated > config.head_dim || rotated % 2 != 0) {
        throw FormatError(
            fmt::format("{}: head_dim {} times partial_rotary_factor {} must be an even "
                        "number of dims from 2 to head_dim",
                        where, config.head_dim, config.partial_rotary_factor));
    }
}

Json parse_json_file(const std::string& path) {
    try {
        Json json = Json::parse(read_file(path));
        if (!json.is_object()) {
            throw FormatError(fmt::format("{}: must hold a JSON object", path));
        }
        return json;
    } catch (const Json::exception& error) {
        throw FormatError(fmt::format("{}: not valid JSON ({})", path, error.what()));
    }
}

Json feed_forward_keys(const ModelConfig& config) {
    if (!config.has_experts()) {
        return {{"intermediate_size", config.intermediate_size}};
    }
    return {{"num_experts", config.num_experts},
            {"num_experts_per_tok", config.num_experts_per_tok},
            {"moe_intermediate_size", config.moe_intermediate_size},
            {"shared_expert_intermediate_size", config.shared_expert_intermediate_size},
            {"output_router_logits", false},
            {"router_aux_loss_coef", config.router_aux_loss_coef}};
}

}  // namespace

std::int64_t ModelConfig::conv_channels() const {
    return 2 * linear_num_key_heads * linear_key_head_dim +
           linear_num_value_heads * linear_value_head_dim;
}

std::int64_t ModelConfig::rotary_dim() const {
    return static_cast<std::int64_t>(static_cast<double>(head_dim) * partial_rotary_factor);
}

HeadCounts ModelConfig::head_counts() const {
    return {.linear_key_heads = linear_num_key_heads,
            .linear_value_heads = linear_num_value_heads,
            .query_heads = num_attention_heads,
            .kv_heads = num_key_value_heads};
}

ModelConfig read_model_config(const std::string& folder) {
    const std::string path = folder + "/config.json";
    const Json json = parse_json_file(path);
    const Section whole(json, path);
    const Section text = whole.has("text_config") ? whole.section("text_config") : whole;
    refuse_unsupported(text);
    ModelConfig config;
    config.vocab_size = text.positive("vocab_size");
    config.hidden_size = text.positive("hidden_size");
    read_feed_forward(text, config);
    config.layer_types = read_layer_types(text);
    config.num_attention_heads = text.positive("num_attention_heads");
    config.num_key_value_heads = text.positive("num_key_value_heads");
    config.head_dim = text.positive("head_dim");
    config.linear_num_key_heads = text.positive("linear_num_key_heads");
    config.linear_num_value_heads = text.positive("linear_num_value_heads");
    config.linear_key_head_dim = text.positive("linear_key_head_dim");
    config.linear_value_head_dim = text.positive("linear_value_head_dim");
    config.linear_conv_kernel_dim = text.positive_or("linear_conv_kernel_dim", 4);
    config.max_position_embeddings = text.positive_or("max_position_embeddings", 262144);
    config.rms_norm_eps = text.number_or("rms_norm_eps", 1e-6);
    config.initializer_range = text.number_or("initializer_range", 0.02);
    // The outer value decides in Transformers, where both exist.
    config.tie_word_embeddings =
        whole.flag_or("tie_word_embeddings", text.flag_or("tie_word_embeddings", false));
    read_rope(text, config);
    check_consistent(config, text.where());
    return config;
}

void write_model_config(const ModelConfig& config,
                        const std::string& folder,
                        at::ScalarType dtype) {
    Json layer_types = Json::array();
    for (const LayerType type : config.layer_types) {
        layer_types.push_back(type == LayerType::kFullAttention ? kFullName : kLinearName);
    }
    // Rotary frequencies dealt to the time, height and width axes in turn; text does not tell them
    // apart.
    const std::int64_t pairs = config.rotary_dim() / 2;
    const Json rope{{"rope_type", "default"},
                    {"rope_theta", config.rope_theta},
                    {"partial_rotary_factor", config.partial_rotary_factor},
                    {"mrope_interleaved", true},
                    {"mrope_section", {(pairs + 2) / 3, (pairs + 1) / 3, pairs / 3}}};
    Json json{{"architectures", Json::array({config.has_experts() ? "Qwen3_5MoeForCausalLM"
                                                                  : "Qwen3_5ForCausalLM"})},
              {"model_type", config.has_experts() ? kMoeType : kDenseType},
              {"dtype", dtype == at::kBFloat16 ? "bfloat16" : "float32"},
              {"attention_bias", false},
              {"attention_dropout", 0.0},
              {"bos_token_id", nullptr},
              {"eos_token_id", nullptr},
              {"pad_token_id", nullptr},
              {"hidden_act", "silu"},
              {"use_cache", true},
              {"vocab_size", config.vocab_size},
              {"hidden_size", config.hidden_size},
              {"num_hidden_layers", config.num_layers()},
              {"layer_types", layer_types},
              {"num_attention_heads", config.num_attention_heads},
              {"num_key_value_heads", config.num_key_value_heads},
              {"head_dim", config.head_dim},
              {"linear_num_key_heads", config.linear_num_key_heads},
              {"linear_num_value_heads", config.linear_num_value_heads},
              {"linear_key_head_dim", config.linear_key_head_dim},
              {"linear_value_head_dim", config.linear_value_head_dim},
              {"linear_conv_kernel_dim", config.linear_conv_kernel_dim},
              {"max_position_embeddings", config.max_position_embeddings},
              {"rms_norm_eps", config.rms_norm_eps},
              {"partial_rotary_factor", config.partial_rotary_factor},
              {"rope_parameters", rope},
              {"initializer_range", config.initializer_range},
              {"tie_word_embeddings", config.tie_word_embeddings}};
    json.update(feed_forward_keys(config));
    write_file_atomically(folder + "/config.json", json.dump(2) + "\n");
}

}  // namespace hybridcp
