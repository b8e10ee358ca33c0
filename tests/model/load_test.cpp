#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

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

using Json = nlohmann::json;
using Tensors = std::map<std::string, at::Tensor>;

void add_tensors(const std::string& path, Tensors& tensors) {
    const SafetensorsFile file(path);
    for (const auto& [name, entry] : file.entries()) {
        tensors[name] = file.read(name);
    }
}

void write_tensors(const std::string& path, const Tensors& tensors) {
    write_safetensors(path, {tensors.begin(), tensors.end()});
}

std::vector<NamedParameter> load(const std::string& folder, std::string* skipped = nullptr) {
    return load_parameters(folder, read_model_config(folder), at::kCPU, skipped);
}

class Load : public ::testing::Test {
  protected:
    void SetUp() override {
        folder_.copy_files_of(golden_model("dense_mini_bf16"));
        add_tensors(folder_.file("model.safetensors"), tensors_);
    }
    /// The FormatError of loading the folder with the tensors as they are now; "" when it loads.
    std::string error_with_tensors() {
        write_tensors(folder_.file("model.safetensors"), tensors_);
        return error();
    }
    std::string error() {
        return message_of<FormatError>([&] { (void)load(folder_.path()); });
    }
    TemporaryFolder folder_;
    Tensors tensors_;
};

TEST(LoadGolden, EveryTextModelBitForBit) {
    for (const char* name : {"dense_tiny", "dense_tiny8", "dense_mini_bf16", "moe_tiny"}) {
        Tensors stored;
        for (const auto& entry : std::filesystem::directory_iterator(golden_model(name))) {
            if (entry.path().extension() == ".safetensors") {
                add_tensors(entry.path(), stored);
            }
        }
        std::string skipped = "unset";
        const std::vector<NamedParameter> parameters = load(golden_model(name), &skipped);
        EXPECT_EQ(skipped, "") << name;
        EXPECT_EQ(parameters.size(), stored.size()) << name;
        for (const auto& [parameter, value] : parameters) {
            EXPECT_TRUE(value.requires_grad() && value.is_leaf()) << parameter;
            EXPECT_EQ(value.scalar_type(), at::kFloat) << parameter;
            EXPECT_TRUE(at::equal(value.detach(), stored.at(parameter).to(at::kFloat)))
                << parameter;
        }
    }
}

TEST(LoadGolden, MultimodalFilesLoadTheTextTower) {
    std::string skipped;
    const std::vector<NamedParameter> parameters = load(golden_model("vl_mini"), &skipped);
    const SafetensorsFile file(golden_model("vl_mini") + "/model.safetensors");
    std::size_t vision = 0;
    for (const auto& [name, entry] : file.entries()) {
        vision += name.starts_with("model.visual.") ? 1 : 0;
    }
    EXPECT_EQ(skipped,
              fmt::format("skipped {} vision and 5 multi-token-prediction tensors", vision));
    EXPECT_EQ(parameters.size() + vision + 5, file.entries().size());
    EXPECT_EQ(parameters[0].name, "model.embed_tokens.weight");
    EXPECT_TRUE(at::equal(parameters[0].value.detach(),
                          file.read("model.language_model.embed_tokens.weight").to(at::kFloat)));
}

TEST(LoadGolden, ExpertsOneByOneAreTheFusedOnes) {
    std::string skipped, skipped_fused;
    const auto parameters = load(golden_model("moe_vl_mini_per_expert"), &skipped);
    const auto fused = load(golden_model("moe_vl_mini"), &skipped_fused);
    EXPECT_EQ(skipped, skipped_fused);
    ASSERT_EQ(parameters.size(), fused.size());
    for (std::size_t i = 0; i < fused.size(); ++i) {
        EXPECT_EQ(parameters[i].name, fused[i].name);
        EXPECT_TRUE(at::equal(parameters[i].value.detach(), fused[i].value.detach()))
            << fused[i].name;
        EXPECT_TRUE(parameters[i].value.requires_grad() && parameters[i].value.is_leaf());
    }
}

TEST(LoadGolden, TheFirstLayersOfALargerModel) {
    const std::string folder = golden_model("dense_tiny8");
    const ModelConfig config = with_num_layers(read_model_config(folder), 3);
    std::string skipped;
    const auto parameters = load_parameters(folder, config, at::kCPU, &skipped);
    EXPECT_EQ(parameters.size(), parameter_shapes(config).size());
    const std::size_t unused =
        parameter_shapes(read_model_config(folder)).size() - parameters.size();
    EXPECT_EQ(skipped, fmt::format("skipped {} unused tensors", unused));
}

TEST_F(Load, AStoredTiedHeadIsSkipped) {
    Json config = Json::parse(read_file(folder_.file("config.json")));
    config["tie_word_embeddings"] = true;
    folder_.write("config.json", config.dump());
    std::string skipped;
    const auto parameters = load(folder_.path(), &skipped);
    EXPECT_EQ(skipped, "skipped 1 unused tensors");
    EXPECT_EQ(parameters.size(), tensors_.size() - 1);
}

TEST_F(Load, MissingTensorsAreNamed) {
    for (const auto& [name, value] : Tensors(tensors_)) {
        tensors_.erase(name);
        const std::string message = error_with_tensors();
        EXPECT_TRUE(mentions(message, fmt::format("tensor {} ", name)) &&
                    mentions(message, "missing"))
            << message;
        tensors_[name] = value;
    }
}

TEST_F(Load, SurplusTensorsAreNamed) {
    for (const char* name : {"model.layers.4.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias",
                             "lm_head.bias", "model.layers.0.self_attn.q_proj.weight",
                             "model.language_model.rotary.inv_freq", "visual.x"}) {
        tensors_[name] = at::ones({2});
        const std::string message = error_with_tensors();
        EXPECT_TRUE(mentions(message, fmt::format("surplus tensor {}", name))) << message;
        tensors_.erase(name);
    }
    EXPECT_EQ(error_with_tensors(), "");
    tensors_["model.language_model.norm.weight"] = tensors_.at("model.norm.weight");
    EXPECT_TRUE(mentions(error_with_tensors(), "parameter model.norm.weight is stored twice"));
}

TEST_F(Load, WrongShapesAndDtypesAreNamed) {
    at::Tensor& conv = tensors_.at("model.layers.1.linear_attn.conv1d.weight");
    const at::Tensor right = conv;
    conv = right.squeeze(1);
    const std::string shape = error_with_tensors();
    EXPECT_TRUE(mentions(shape,
                         "tensor model.layers.1.linear_attn.conv1d.weight has shape [64, 4], the "
                         "configuration needs [64, 1, 4]"))
        << shape;
    conv = right.to(at::kInt);
    const std::string dtype = error_with_tensors();
    EXPECT_TRUE(mentions(dtype, "conv1d.weight has dtype Int")) << dtype;
    conv = right.to(at::kHalf);
    EXPECT_EQ(error_with_tensors(), "");
}

class LoadExperts : public Load {
  protected:
    void SetUp() override {
        folder_.copy_files_of(golden_model("moe_vl_mini_per_expert"));
        add_tensors(folder_.file("model.safetensors"), tensors_);
    }
    const std::string experts_ = "model.language_model.layers.2.mlp.experts.";
};

TEST_F(LoadExperts, DamagedSetsAreNamed) {
    for (const char* part : {"gate", "up", "down"}) {
        const std::string name = fmt::format("{}3.{}_proj.weight", experts_, part);
        ASSERT_EQ(tensors_.count(name), 1U) << name;
        const at::Tensor right = tensors_.at(name);
        tensors_.erase(name);
        EXPECT_TRUE(mentions(error_with_tensors(),
                             fmt::format("layers.2.mlp.experts.3.{}_proj.weight [{}, {}] is "
                                         "missing",
                                         part, right.size(0), right.size(1))))
            << error();
        tensors_[name] = right.t().contiguous();
        EXPECT_TRUE(mentions(error_with_tensors(), name + " has shape")) << error();
        tensors_[name] = right.to(at::kInt);
        EXPECT_TRUE(mentions(error_with_tensors(), name + " has dtype")) << error();
        tensors_[name] = right;
    }
    for (const char* rest : {"4.up_proj.weight", "03.up_proj.weight", "-1.up_proj.weight",
                             "3.up_proj.bias", "3.gate_up_proj.weight", "x.up_proj.weight"}) {
        tensors_[experts_ + rest] = at::ones({8, 16});
        EXPECT_TRUE(mentions(error_with_tensors(), "surplus tensor " + experts_ + rest)) << error();
        tensors_.erase(experts_ + rest);
    }
    EXPECT_EQ(error_with_tensors(), "");
    tensors_[experts_ + "down_proj"] = at::ones({4, 16, 8});
    EXPECT_TRUE(mentions(error_with_tensors(),
                         "parameter model.layers.2.mlp.experts.down_proj is stored twice"))
        << error();
}

TEST_F(LoadExperts, UnusedLayersAreSkipped) {
    const ModelConfig config = with_num_layers(read_model_config(folder_.path()), 2);
    std::string skipped;
    const auto parameters = load_parameters(folder_.path(), config, at::kCPU, &skipped);
    EXPECT_EQ(parameters.size(), parameter_shapes(config).size());
    EXPECT_TRUE(mentions(skipped, "unused tensors")) << skipped;
}

TEST_F(Load, MissingAndTruncatedFilesAreNamed) {
    const std::string weights = read_file(folder_.file("model.safetensors"));
    folder_.write("model.safetensors", weights.substr(0, weights.size() - 1));
    EXPECT_TRUE(mentions(error(), "model.safetensors: truncated")) << error();
    std::filesystem::remove(folder_.file("model.safetensors"));
    EXPECT_TRUE(mentions(error(), "neither model.safetensors nor model.safetensors.index.json"));
    const ModelConfig config = read_model_config(folder_.path());
    std::filesystem::remove(folder_.file("config.json"));
    EXPECT_TRUE(mentions(
        message_of<FormatError>([&] { (void)load_parameters(folder_.path(), config, at::kCPU); }),
        folder_.file("config.json")));
}

TEST(LoadShards, DamagedSetsAreNamed) {
    const TemporaryFolder folder;
    folder.copy_files_of(golden_model("dense_tiny8"));
    const std::string index_name = "model.safetensors.index.json";
    const std::string second = "model-00002-of-00003.safetensors";
    const std::string index = read_file(folder.file(index_name));
    const std::string shard = read_file(folder.file(second));
    const auto error = [&] { return message_of<FormatError>([&] { (void)load(folder.path()); }); };
    ASSERT_EQ(error(), "");

    std::filesystem::remove(folder.file(second));
    EXPECT_TRUE(mentions(error(), "shard " + second + " is missing")) << error();
    folder.write(second, shard.substr(0, shard.size() / 2));
    EXPECT_TRUE(mentions(error(), second + ": truncated")) << error();
    folder.write(second, shard);

    Json json = Json::parse(index);
    json["weight_map"]["model.norm.weight"] = second;
    folder.write(index_name, json.dump());
    EXPECT_TRUE(mentions(error(), "tensor model.norm.weight is not in ")) << error();
    EXPECT_TRUE(mentions(error(), second)) << error();
    json["weight_map"].erase("model.norm.weight");
    folder.write(index_name, json.dump());
    EXPECT_TRUE(mentions(error(), "tensor model.norm.weight is not in " + index_name)) << error();
    folder.write(index_name, "{\"weight_map\": 3}");
    EXPECT_TRUE(mentions(error(), "not a valid index")) << error();
    folder.write(index_name, "{");
    EXPECT_TRUE(mentions(error(), "not a valid index")) << error();
}

}  // namespace
}  // namespace hybridcp
