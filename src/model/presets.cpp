// The eight sizes of the Qwen3.5 family (released text towers), and `tiny` and `tiny-moe`, small
// enough to train on a laptop.
#include <fmt/ranges.h>

#include <array>

#include "hybridcp/error.h"
#include "hybridcp/model.h"

namespace hybridcp {

namespace {

// Every fourth layer is full attention, in all sizes.
std::vector<LayerType> interleaved_layers(std::int64_t num_layers) {
    std::vector<LayerType> types;
    for (std::int64_t layer = 0; layer < num_layers; ++layer) {
        types.push_back(layer % 4 == 3 ? LayerType::kFullAttention : LayerType::kLinearAttention);
    }
    return types;
}

struct ReleasedSize {
    const char* name;
    std::int64_t hidden_size;
    std::int64_t intermediate_size;
    std::int64_t num_layers;
    std::int64_t query_heads;
    std::int64_t kv_heads;
    std::int64_t linear_value_heads;
    bool tied;
    std::int64_t num_experts;  // 0: dense
    std::int64_t num_experts_per_tok;
    std::int64_t expert_size;  // of the routed experts and of the shared one
};

constexpr std::array<ReleasedSize, 8> kReleasedSizes{{
    {"qwen3_5-0.8b", 1024, 3584, 24, 8, 2, 16, true, 0, 0, 0},
    {"qwen3_5-2b", 2048, 6144, 24, 8, 2, 16, true, 0, 0, 0},
    {"qwen3_5-4b", 2560, 9216, 32, 16, 4, 32, true, 0, 0, 0},
    {"qwen3_5-9b", 4096, 12288, 32, 16, 4, 32, false, 0, 0, 0},
    {"qwen3_5-27b", 5120, 17408, 64, 24, 4, 48, false, 0, 0, 0},
    {"qwen3_5-35b-a3b", 2048, 0, 40, 16, 2, 32, false, 256, 8, 512},
    {"qwen3_5-122b-a10b", 3072, 0, 48, 32, 2, 64, false, 256, 8, 1024},
    {"qwen3_5-397b-a17b", 4096, 0, 60, 32, 2, 64, false, 512, 10, 1024},
}};

constexpr double kReleasedAuxLossCoefficient = 0.001;

ModelConfig released_config(const ReleasedSize& size) {
    ModelConfig config;
    config.vocab_size = 248320;
    config.hidden_size = size.hidden_size;
    config.intermediate_size = size.intermediate_size;
    config.layer_types = interleaved_layers(size.num_layers);
    config.num_attention_heads = size.query_heads;
    config.num_key_value_heads = size.kv_heads;
    config.head_dim = 256;
    config.linear_num_key_heads = 16;
    config.linear_num_value_heads = size.linear_value_heads;
    config.linear_key_head_dim = 128;
    config.linear_value_head_dim = 128;
    config.tie_word_embeddings = size.tied;
    if (size.num_experts > 0) {
        config.num_experts = size.num_experts;
        config.num_experts_per_tok = size.num_experts_per_tok;
        config.moe_intermediate_size = size.expert_size;
        config.shared_expert_intermediate_size = size.expert_size;
        config.router_aux_loss_coef = kReleasedAuxLossCoefficient;
    }
    return config;
}

// 1.2 M parameters. The vocabulary is the 256 bytes and room for special tokens.
ModelConfig tiny_config() {
    ModelConfig config;
    config.vocab_size = 320;
    config.hidden_size = 128;
    config.intermediate_size = 384;
    config.layer_types = interleaved_layers(4);
    config.num_attention_heads = 4;
    config.num_key_value_heads = 2;
    config.head_dim = 64;
    config.linear_num_key_heads = 4;
    config.linear_num_value_heads = 8;
    config.linear_key_head_dim = 32;
    config.linear_value_head_dim = 32;
    return config;
}

// `tiny` with a narrow feed-forward: most of a step is linear attention.
ModelConfig tiny_linear_config() {
    ModelConfig config = tiny_config();
    config.intermediate_size = 64;
    return config;
}

// 1.7 M parameters, of which a token uses 1.1 M.
ModelConfig tiny_moe_config() {
    ModelConfig config = tiny_config();
    config.intermediate_size = 0;
    config.num_experts = 8;
    config.num_experts_per_tok = 2;
    config.moe_intermediate_size = 96;
    config.shared_expert_intermediate_size = 96;
    config.router_aux_loss_coef = kReleasedAuxLossCoefficient;
    return config;
}

}  // namespace

ModelConfig preset_model_config(const std::string& name) {
    if (name == "tiny") {
        return tiny_config();
    }
    if (name == "tiny-linear") {
        return tiny_linear_config();
    }
    if (name == "tiny-moe") {
        return tiny_moe_config();
    }
    std::vector<std::string> known{"tiny", "tiny-linear", "tiny-moe"};
    for (const ReleasedSize& size : kReleasedSizes) {
        if (name == size.name) {
            return released_config(size);
        }
        known.emplace_back(size.name);
    }
    throw UsageError(fmt::format("unknown model preset '{}': did you mean {}? (known: {})", name,
                                 nearest_word(name, known), fmt::join(known, ", ")));
}

ModelConfig with_num_layers(ModelConfig config, std::int64_t num_layers) {
    if (num_layers < 1 || num_layers > config.num_layers()) {
        throw UsageError(
            fmt::format("num_layers {} is out of range: the model has {} layers, choose 1 to {}",
                        num_layers, config.num_layers(), config.num_layers()));
    }
    config.layer_types.resize(static_cast<std::size_t>(num_layers));
    return config;
}

}  // namespace hybridcp
