#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "core/files.h"
#include "hybridcp/error.h"
#include "hybridcp/model.h"
#include "model/safetensors.h"
#include "model/test_files.h"

namespace hybridcp {
namespace {

using testing::golden_model;
using testing::mentions;
using testing::message_of;
using testing::TemporaryFolder;

HybridModel load(const std::string& folder) {
    const ModelConfig config = read_model_config(folder);
    return {config, load_parameters(folder, config, at::kCPU), at::kFloat};
}

void expect_equal_bits(const HybridModel& a, const HybridModel& b) {
    ASSERT_EQ(a.parameters().size(), b.parameters().size());
    for (std::size_t i = 0; i < a.parameters().size(); ++i) {
        EXPECT_EQ(a.parameters()[i].name, b.parameters()[i].name);
        EXPECT_TRUE(at::equal(a.parameters()[i].value.detach(), b.parameters()[i].value.detach()))
            << a.parameters()[i].name;
    }
}

TEST(Save, LoadsBackWithEqualBits) {
    for (const char* name : {"dense_tiny", "dense_tiny8", "dense_mini_bf16", "vl_mini", "moe_tiny",
                             "moe_vl_mini_per_expert"}) {
        const HybridModel model = load(golden_model(name));
        const TemporaryFolder folder;
        save_model(model, folder.file("new/folder"), at::kFloat);
        expect_equal_bits(load(folder.file("new/folder")), model);
        const SafetensorsFile file(folder.file("new/folder/model.safetensors"));
        EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
        EXPECT_EQ(file.contains("lm_head.weight"), !model.config().tie_word_embeddings);
    }
}

TEST(Save, ExpertsAreStoredFusedAsInTheReleasedFiles) {
    const HybridModel model = load(golden_model("moe_vl_mini_per_expert"));
    const TemporaryFolder folder;
    save_model(model, folder.path(), at::kBFloat16);
    const SafetensorsFile file(folder.file("model.safetensors"));
    const SafetensorsFile released(golden_model("moe_vl_mini") + "/model.safetensors");
    std::size_t num_fused = 0;
    for (const auto& [name, entry] : file.entries()) {
        if (mentions(name, ".experts.")) {
            ++num_fused;
            EXPECT_EQ(entry.dtype, at::kBFloat16) << name;
            EXPECT_TRUE(released.contains("model.language_" + name)) << name;
        }
    }
    EXPECT_EQ(num_fused, 8U);
}

TEST(Save, Bf16KeepsNormsAndGatesInFp32) {
    const HybridModel model =
        load(golden_model("dense_mini_bf16"));  // its values are exact in bf16
    const TemporaryFolder folder;
    save_model(model, folder.path(), at::kBFloat16);
    expect_equal_bits(load(folder.path()), model);
    const SafetensorsFile file(folder.file("model.safetensors"));
    for (const auto& [name, entry] : file.entries()) {
        const bool exact =
            mentions(name, "norm.weight") || mentions(name, "A_log") || mentions(name, "dt_bias");
        EXPECT_EQ(entry.dtype, exact ? at::kFloat : at::kBFloat16) << name;
    }
    const auto config = nlohmann::json::parse(read_file(folder.file("config.json")));
    EXPECT_EQ(config.at("dtype"), "bfloat16");
    EXPECT_TRUE(mentions(
        message_of<UsageError>([&] { save_model(model, folder.path(), at::kHalf); }), "Half"));
}

TEST(Save, LargeModelsAreShardedAndAnEarlierFormIsReplaced) {
    const HybridModel model = load(golden_model("dense_tiny"));
    const TemporaryFolder folder;
    const std::string single = folder.file("model.safetensors");
    const std::string index = folder.file("model.safetensors.index.json");
    save_model(model, folder.path(), at::kFloat);
    save_model(model, folder.path(), at::kFloat, /*max_shard_bytes=*/400'000);
    EXPECT_FALSE(std::filesystem::exists(single)) << "it would be loaded instead of the shards";
    expect_equal_bits(load(folder.path()), model);

    const auto json = nlohmann::json::parse(read_file(index));
    std::set<std::string> shards;
    std::int64_t total_bytes = 0;
    for (const auto& [tensor, file_name] : json.at("weight_map").items()) {
        shards.insert(file_name.get<std::string>());
    }
    for (const std::string& shard : shards) {
        std::int64_t shard_bytes = 0;
        const SafetensorsFile file(folder.file(shard));
        for (const auto& [name, entry] : file.entries()) {
            shard_bytes += static_cast<std::int64_t>(entry.end - entry.begin);
        }
        EXPECT_LE(shard_bytes, 400'000) << shard;
        total_bytes += shard_bytes;
    }
    EXPECT_EQ(shards.size(), 4U);
    EXPECT_EQ(*shards.begin(), "model-00001-of-00004.safetensors");
    EXPECT_EQ(json.at("metadata").at("total_size"), total_bytes);

    save_model(model, folder.path(), at::kFloat);
    EXPECT_FALSE(std::filesystem::exists(index));
    expect_equal_bits(load(folder.path()), model);
}

TEST(Save, AFolderThatCannotBeMadeIsNamed) {
    const HybridModel model = load(golden_model("dense_mini_bf16"));
    const TemporaryFolder folder;
    folder.write("file", "");
    const std::string path = folder.file("file/sub");
    EXPECT_TRUE(
        mentions(message_of<FormatError>([&] { save_model(model, path, at::kFloat); }), path));
}

class Random : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Presets, Random, ::testing::Values("tiny", "tiny-moe"));

TEST_P(Random, FollowsHuggingFacesRules) {
    const ModelConfig config = preset_model_config(GetParam());
    const HybridModel model = HybridModel::random(config, 17, at::kFloat, at::kCPU);
    for (const auto& [name, parameter] : model.parameters()) {
        const at::Tensor value = parameter.detach();
        if (name.ends_with("linear_attn.norm.weight") || name.ends_with("dt_bias")) {
            EXPECT_TRUE(value.eq(1).all().item<bool>()) << name;
        } else if (name.ends_with("norm.weight")) {
            EXPECT_TRUE(value.eq(0).all().item<bool>()) << name;
        } else if (name.ends_with("A_log")) {
            EXPECT_TRUE(
                value.exp().ge(0.0099).logical_and(value.exp().le(16.001)).all().item<bool>())
                << name;
            EXPECT_GT(value.std().item<double>(), 0.1) << name;
        } else {
            const double n = static_cast<double>(value.numel());
            EXPECT_NEAR(value.mean().item<double>(), 0, 5 * 0.02 / std::sqrt(n)) << name;
            EXPECT_NEAR(value.std().item<double>(), 0.02, 5 * 0.02 / std::sqrt(2 * n)) << name;
        }
        EXPECT_TRUE(parameter.requires_grad() && parameter.is_leaf()) << name;
    }
}

TEST(RandomSeed, AParameterDependsOnItsNameAndTheSeedOnly) {
    const ModelConfig config = preset_model_config("tiny");
    const HybridModel model = HybridModel::random(config, 17, at::kFloat, at::kCPU);
    expect_equal_bits(HybridModel::random(config, 17, at::kBFloat16, at::kCPU), model);
    const HybridModel shorter =
        HybridModel::random(with_num_layers(config, 2), 17, at::kFloat, at::kCPU);
    for (const auto& [name, value] : shorter.parameters()) {
        EXPECT_TRUE(at::equal(value.detach(), model.parameter(name).detach())) << name;
    }
    const char* up = "model.layers.0.mlp.up_proj.weight";
    const HybridModel other = HybridModel::random(config, 18, at::kFloat, at::kCPU);
    EXPECT_FALSE(at::equal(other.parameter(up).detach(), model.parameter(up).detach()));
    EXPECT_FALSE(at::equal(model.parameter("model.layers.1.mlp.up_proj.weight").detach(),
                           model.parameter(up).detach()));
}

TEST(Model, ParametersThatDoNotFitAreRefused) {
    const ModelConfig config = read_model_config(golden_model("dense_mini_bf16"));
    const auto error = [&](std::vector<NamedParameter> parameters,
                           at::ScalarType dtype = at::kFloat) {
        return message_of<UsageError>([&] { HybridModel(config, std::move(parameters), dtype); });
    };
    const auto parameters = load_parameters(golden_model("dense_mini_bf16"), config, at::kCPU);
    EXPECT_EQ(error(parameters), "");
    EXPECT_TRUE(mentions(error(parameters, at::kHalf), "Half"));
    EXPECT_TRUE(mentions(error({}), "number of parameters"));
    auto changed = parameters;
    std::swap(changed[3], changed[4]);
    EXPECT_TRUE(mentions(error(changed), changed[3].name));
    changed = parameters;
    changed[2].value = at::ones({3}).requires_grad_(true);
    EXPECT_TRUE(mentions(error(changed), "must have shape [64, 24]"));
    changed[2].value = parameters[2].value.detach().to(at::kBFloat16);
    EXPECT_TRUE(mentions(error(changed), "must be a leaf in fp32 or the compute dtype"));
}

}  // namespace
}  // namespace hybridcp
