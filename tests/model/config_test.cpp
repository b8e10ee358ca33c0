#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/files.h"
#include "hybridcp/error.h"
#include "hybridcp/model.h"
#include "model/test_files.h"

namespace hybridcp {
namespace {

using testing::golden_model;
using testing::mentions;
using testing::message_of;
using testing::TemporaryFolder;

using Json = nlohmann::json;

std::int64_t count_parameters(const ModelConfig& config) {
    std::int64_t count = 0;
    for (const ParameterShape& parameter : parameter_shapes(config)) {
        std::int64_t size = 1;
        for (const std::int64_t extent : parameter.shape) {
            size *= extent;
        }
        count += size;
    }
    return count;
}

class Config : public ::testing::Test {
  protected:
    ModelConfig read(const Json& json) {
        folder_.write("config.json", json.dump());
        return read_model_config(folder_.path());
    }
    template <typename E>
    std::string error_of(const Json& json) {
        return message_of<E>([&] { (void)read(json); });
    }
    /// dense_tiny's config.json with one key replaced (null removes it).
    static Json changed(const std::string& key, const Json& value) {
        Json json = flat();
        json[key] = value;
        return json;
    }
    static Json flat() {
        return Json::parse(read_file(golden_model("dense_tiny") + "/config.json"));
    }
    TemporaryFolder folder_;
};

TEST_F(Config, ReadsAFlatFile) {
    const ModelConfig config = read_model_config(golden_model("dense_tiny8"));
    EXPECT_EQ(config.vocab_size, 256);
    EXPECT_EQ(config.hidden_size, 48);
    EXPECT_EQ(config.intermediate_size, 40);
    EXPECT_EQ(config.num_layers(), 8);
    EXPECT_EQ(config.layer_types[6], LayerType::kLinearAttention);
    EXPECT_EQ(config.layer_types[7], LayerType::kFullAttention);
    EXPECT_EQ(config.num_attention_heads, 4);
    EXPECT_EQ(config.num_key_value_heads, 2);
    EXPECT_EQ(config.head_dim, 32);
    EXPECT_EQ(config.linear_num_key_heads, 1);
    EXPECT_EQ(config.linear_num_value_heads, 3);
    EXPECT_EQ(config.linear_key_head_dim, 32);
    EXPECT_EQ(config.linear_value_head_dim, 32);
    EXPECT_EQ(config.conv_channels(), 160);
    EXPECT_EQ(config.rotary_dim(), 8);
    EXPECT_EQ(config.rms_norm_eps, 1e-5);
    EXPECT_EQ(config.rope_theta, 1e4);
    EXPECT_EQ(config.max_position_embeddings, 2048);
    EXPECT_TRUE(config.tie_word_embeddings);
}

TEST_F(Config, ReadsANestedFile) {
    const ModelConfig config = read_model_config(golden_model("vl_mini"));
    EXPECT_EQ(config.hidden_size, 16);
    EXPECT_EQ(config.intermediate_size, 24);
    EXPECT_EQ(config.rope_theta, 1e7);
    EXPECT_FALSE(config.tie_word_embeddings);
    Json nested{{"model_type", "qwen3_5"}, {"text_config", flat()}, {"tie_word_embeddings", true}};
    EXPECT_TRUE(read(nested).tie_word_embeddings) << "the outer value decides";
    nested.erase("tie_word_embeddings");
    nested["text_config"]["tie_word_embeddings"] = true;
    EXPECT_TRUE(read(nested).tie_word_embeddings);
}

TEST_F(Config, ReadsExperts) {
    const ModelConfig flat_config = read_model_config(golden_model("moe_tiny"));
    EXPECT_TRUE(flat_config.has_experts());
    EXPECT_EQ(flat_config.num_experts, 8);
    EXPECT_EQ(flat_config.num_experts_per_tok, 2);
    EXPECT_EQ(flat_config.moe_intermediate_size, 16);
    EXPECT_EQ(flat_config.shared_expert_intermediate_size, 24);
    EXPECT_EQ(flat_config.intermediate_size, 0);
    EXPECT_EQ(flat_config.router_aux_loss_coef, 0.001);
    for (const char* name : {"moe_vl_mini", "moe_vl_mini_per_expert"}) {
        EXPECT_EQ(read_model_config(golden_model(name)).num_experts, 4) << name;
    }
    EXPECT_FALSE(read_model_config(golden_model("dense_tiny")).has_experts());

    const Json golden = Json::parse(read_file(golden_model("moe_tiny") + "/config.json"));
    Json json = golden;
    json["model_type"] = "qwen3_5_moe";
    json["router_aux_loss_coef"] = nullptr;
    EXPECT_EQ(read(json).router_aux_loss_coef, 0.001) << "Transformers' default";
    for (const char* key : {"num_experts", "num_experts_per_tok", "moe_intermediate_size",
                            "shared_expert_intermediate_size"}) {
        json = golden;
        json.erase(key);
        EXPECT_TRUE(mentions(error_of<FormatError>(json), fmt::format("'{}' is missing", key)));
    }
    json = golden;
    json["num_experts_per_tok"] = 9;
    EXPECT_TRUE(mentions(error_of<FormatError>(json), "at most num_experts = 8"));
    const std::vector<std::pair<std::string, Json>> unsupported{
        {"mlp_only_layers", {1}}, {"decoder_sparse_step", 2}, {"norm_topk_prob", false}};
    for (const auto& [key, value] : unsupported) {
        json = golden;
        json[key] = value;
        EXPECT_TRUE(mentions(error_of<UsageError>(json), key));
    }
}

TEST_F(Config, LayerTypesOrInterval) {
    Json json = flat();
    json.erase("layer_types");
    json["num_hidden_layers"] = 7;
    json["full_attention_interval"] = 3;
    const std::vector<LayerType> types = read(json).layer_types;
    ASSERT_EQ(types.size(), 7U);
    for (std::size_t layer = 0; layer < 7; ++layer) {
        EXPECT_EQ(types[layer] == LayerType::kFullAttention, layer == 2 || layer == 5) << layer;
    }
    json.erase("full_attention_interval");
    EXPECT_EQ(read(json).layer_types[3], LayerType::kFullAttention) << "every fourth by default";

    json = flat();
    json["layer_types"] = {"full_attention", "linear_attention", "linear_attention",
                           "linear_attention"};
    json["full_attention_interval"] = 4;
    EXPECT_EQ(read(json).layer_types[0], LayerType::kFullAttention) << "layer_types goes first";
    EXPECT_EQ(read(json).layer_types[3], LayerType::kLinearAttention);
}

TEST_F(Config, RopeValuesFlatOrNested) {
    Json json = flat();
    json.erase("rope_parameters");
    json["rope_theta"] = 5e5;
    json["partial_rotary_factor"] = 0.5;
    EXPECT_EQ(read(json).rope_theta, 5e5);
    EXPECT_EQ(read(json).rotary_dim(), 16);
    json["rope_scaling"] = {{"type", "mrope"}, {"mrope_section", {2, 1, 1}}};
    EXPECT_EQ(read(json).rope_theta, 5e5);
    json.erase("rope_theta");
    EXPECT_TRUE(mentions(error_of<FormatError>(json), "key 'rope_theta' is missing"));
}

TEST_F(Config, MissingAndWrongKeysAreNamed) {
    for (const char* key :
         {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
          "num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads",
          "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"}) {
        const std::string missing = error_of<FormatError>(changed(key, nullptr));
        EXPECT_TRUE(mentions(missing, fmt::format("config.json: key '{}' is missing", key)))
            << missing;
        for (const Json& bad : {Json(0), Json(-4), Json(2.5), Json("4"), Json(true),
                                Json::array({4}), Json(std::uint64_t{1} << 40)}) {
            const std::string wrong = error_of<FormatError>(changed(key, bad));
            EXPECT_TRUE(mentions(wrong, fmt::format("key '{}' must be", key)))
                << bad << ": " << wrong;
        }
    }
    EXPECT_TRUE(
        mentions(error_of<FormatError>(changed("rms_norm_eps", "small")), "'rms_norm_eps'"));
    EXPECT_TRUE(
        mentions(error_of<FormatError>(changed("tie_word_embeddings", 1)), "true or false"));
    EXPECT_TRUE(mentions(error_of<FormatError>(changed("layer_types", {"full_attention"})),
                         "num_hidden_layers = 4"));
    EXPECT_TRUE(mentions(
        error_of<FormatError>(changed(
            "layer_types", {"a", "linear_attention", "linear_attention", "full_attention"})),
        "got \"a\""));
    EXPECT_TRUE(
        mentions(error_of<FormatError>(changed("num_key_value_heads", 3)), "not a multiple"));
    EXPECT_TRUE(
        mentions(error_of<FormatError>(changed("linear_num_key_heads", 3)), "not a multiple"));
    EXPECT_TRUE(mentions(error_of<FormatError>(changed("head_dim", 4)), "partial_rotary_factor"));
    EXPECT_TRUE(mentions(error_of<FormatError>(Json::array()), "JSON object"));
}

TEST_F(Config, MissingOrBrokenFilesAreNamed) {
    EXPECT_TRUE(mentions(message_of<FormatError>([&] { (void)read_model_config(folder_.path()); }),
                         folder_.file("config.json")));
    folder_.write("config.json", "{\"vocab_size\": ");
    EXPECT_TRUE(mentions(message_of<FormatError>([&] { (void)read_model_config(folder_.path()); }),
                         "not valid JSON"));
}

TEST_F(Config, WhatChangesTheNumbersIsRefused) {
    EXPECT_TRUE(mentions(error_of<UsageError>(changed("num_experts", 8)),
                         "num_experts (of a dense model_type) '8'"));
    EXPECT_TRUE(mentions(error_of<FormatError>(changed("model_type", "qwen3_5_moe_text")),
                         "key 'num_experts' is missing"));
    EXPECT_TRUE(mentions(error_of<UsageError>(changed("model_type", "qwen3_5_moe_vision")),
                         "only 'qwen3_5_moe_text' is"));
    EXPECT_TRUE(
        mentions(error_of<UsageError>(changed("model_type", "llama")), "model_type 'llama'"));
    EXPECT_TRUE(mentions(error_of<UsageError>(changed("hidden_act", "gelu")), "hidden_act 'gelu'"));
    EXPECT_TRUE(mentions(error_of<UsageError>(changed("attention_bias", true)), "attention_bias"));
    EXPECT_TRUE(
        mentions(error_of<UsageError>(changed("attn_output_gate", false)), "attn_output_gate"));
    EXPECT_TRUE(
        mentions(error_of<UsageError>(changed("attention_dropout", 0.1)), "attention_dropout"));
    Json yarn = flat();
    yarn["rope_parameters"]["rope_type"] = "yarn";
    EXPECT_TRUE(mentions(error_of<UsageError>(yarn), "rope_type 'yarn'"));
}

TEST_F(Config, WrittenAsTransformersWritesIt) {
    for (const char* name : {"dense_tiny", "dense_tiny8", "dense_mini_bf16", "moe_tiny"}) {
        Json golden = Json::parse(read_file(golden_model(name) + "/config.json"));
        golden.erase("transformers_version");
        const at::ScalarType dtype = golden.at("dtype") == "bfloat16" ? at::kBFloat16 : at::kFloat;
        write_model_config(read_model_config(golden_model(name)), folder_.path(), dtype);
        EXPECT_EQ(Json::parse(read_file(folder_.file("config.json"))), golden) << name;
    }
}

TEST(Presets, ParameterCountsAreThoseOfTheReleasedModels) {
    // Text towers, in billions, to the last digit given.
    const std::map<std::string, double> billions{
        {"qwen3_5-0.8b", 0.75},       {"qwen3_5-2b", 1.88},         {"qwen3_5-4b", 4.21},
        {"qwen3_5-9b", 8.95},         {"qwen3_5-27b", 26.90},       {"qwen3_5-35b-a3b", 34.66},
        {"qwen3_5-122b-a10b", 122.1}, {"qwen3_5-397b-a17b", 396.35}};
    for (const auto& [name, expected] : billions) {
        const double count = static_cast<double>(count_parameters(preset_model_config(name)));
        EXPECT_NEAR(count / 1e9, expected, name == "qwen3_5-122b-a10b" ? 0.05 : 0.005) << name;
    }
    for (const char* name : {"tiny", "tiny-moe"}) {
        const std::int64_t tiny = count_parameters(preset_model_config(name));
        EXPECT_GT(tiny, 1'000'000) << name;
        EXPECT_LT(tiny, 2'000'000) << name;
    }
}

TEST(Presets, RoundTripThroughAFile) {
    const TemporaryFolder folder;
    for (const char* name : {"tiny", "tiny-moe", "qwen3_5-0.8b", "qwen3_5-27b", "qwen3_5-35b-a3b",
                             "qwen3_5-397b-a17b"}) {
        const ModelConfig config = preset_model_config(name);
        write_model_config(config, folder.path());
        const ModelConfig read = read_model_config(folder.path());
        EXPECT_EQ(count_parameters(read), count_parameters(config)) << name;
        EXPECT_EQ(read.layer_types, config.layer_types) << name;
        EXPECT_EQ(read.tie_word_embeddings, config.tie_word_embeddings) << name;
        EXPECT_EQ(read.rope_theta, config.rope_theta) << name;
        EXPECT_EQ(read.rms_norm_eps, config.rms_norm_eps) << name;
        EXPECT_EQ(read.num_experts_per_tok, config.num_experts_per_tok) << name;
        EXPECT_EQ(read.router_aux_loss_coef, config.router_aux_loss_coef) << name;
    }
    write_model_config(preset_model_config("qwen3_5-9b"), folder.path());
    const Json json = Json::parse(read_file(folder.file("config.json")));
    EXPECT_EQ(json.at("rope_parameters").at("mrope_section"), Json::array({11, 11, 10}));
}

TEST(Presets, UnknownNamesAndLayerCountsAreRefused) {
    EXPECT_TRUE(mentions(message_of<UsageError>([] { (void)preset_model_config("qwen3_5-0.8B"); }),
                         "did you mean qwen3_5-0.8b?"));
    EXPECT_TRUE(mentions(message_of<UsageError>([] { (void)preset_model_config("moe-tiny"); }),
                         "qwen3_5-122b-a10b"));
    const ModelConfig tiny = preset_model_config("tiny");
    EXPECT_EQ(with_num_layers(tiny, 3).num_layers(), 3);
    for (const std::int64_t count : {-1, 0, 5}) {
        EXPECT_TRUE(mentions(message_of<UsageError>([&] { (void)with_num_layers(tiny, count); }),
                             "choose 1 to 4"));
    }
}

}  // namespace
}  // namespace hybridcp
