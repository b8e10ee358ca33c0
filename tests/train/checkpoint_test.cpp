#include "train/checkpoint.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/files.h"
#include "hybridcp/error.h"
#include "mesh_threads.h"

namespace hybridcp {
namespace {

namespace fs = std::filesystem;
using testing::message_of;
using testing::TemporaryFolder;

const std::string kModelFolder = std::string(HCP_GOLDEN_DIR) + "/models/dense_tiny";

HybridModel load_model() {
    const ModelConfig config = read_model_config(kModelFolder);
    return HybridModel(config, load_parameters(kModelFolder, config, at::kCPU), at::kFloat);
}

void fill_gradients(const HybridModel& model, std::uint64_t seed) {
    at::manual_seed(seed);
    for (const NamedParameter& parameter : model.parameters()) {
        at::Tensor value = parameter.value;
        value.mutable_grad() = at::randn_like(value.detach());
    }
}

class Checkpoints : public ::testing::Test {
  protected:
    std::string save(std::int64_t step) {
        return save_checkpoint(dir_, model_, optimizer_,
                               {.step = step, .consumed_rows = 4 * step, .data_fingerprint = "d"});
    }
    [[nodiscard]] bool exists(const std::string& name) const { return fs::exists(folder_ / name); }

    TemporaryFolder folder_;
    std::string dir_ = folder_ / "run";
    HybridModel model_ = load_model();
    AdamW optimizer_{whole_pieces(model_.parameters()), {}};
};

TEST_F(Checkpoints, AreReadBackBitByBit) {
    fill_gradients(model_, 3);
    optimizer_.step(0.01);
    const std::string folder = save(1);
    EXPECT_EQ(folder, dir_ + "/step-00000001");
    EXPECT_FALSE(checkpoint_damage(folder).has_value());

    const HybridModel other = load_model();
    AdamW other_optimizer(whole_pieces(other.parameters()), {});
    const TrainState state = load_checkpoint(folder, other, other_optimizer);
    EXPECT_EQ(state.step, 1);
    EXPECT_EQ(state.consumed_rows, 4);
    EXPECT_EQ(state.data_fingerprint, "d");
    for (AdamW* each : {&optimizer_, &other_optimizer}) {
        fill_gradients(each == &optimizer_ ? model_ : other, 4);
        each->step(0.01);
    }
    for (std::size_t i = 0; i < model_.parameters().size(); ++i) {
        EXPECT_TRUE(at::equal(model_.parameters()[i].value, other.parameters()[i].value))
            << model_.parameters()[i].name;
    }
}

TEST_F(Checkpoints, LoadAsAModelFolder) {
    const std::string folder = save(1);
    const auto loaded = load_parameters(folder, read_model_config(folder), at::kCPU);
    EXPECT_TRUE(at::equal(loaded.front().value, model_.parameters().front().value));
}

TEST_F(Checkpoints, TornAndDamagedOnesAreSkippedAndReported) {
    std::vector<std::string> skipped;
    EXPECT_FALSE(latest_checkpoint(dir_, skipped).has_value());
    const std::string good = save(1);
    const std::string short_file = save(2);
    fs::resize_file(short_file + "/optimizer.safetensors",
                    fs::file_size(short_file + "/optimizer.safetensors") - 1);
    const std::string flipped = save(3);
    {
        std::fstream file(flipped + "/model.safetensors",
                          std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(-100, std::ios::end);
        const char old = static_cast<char>(file.peek());
        file.seekp(-100, std::ios::end);
        file.put(static_cast<char>(old ^ 1));
    }
    const std::string unfinished = save(4);
    fs::remove(unfinished + "/manifest.json");
    const std::string missing = save(5);
    fs::remove(missing + "/state.json");
    const std::string half_manifest = save(6);
    fs::resize_file(half_manifest + "/manifest.json", 40);
    fs::create_directories(dir_ + "/step-00000007.tmp");  // a crash before the rename

    EXPECT_EQ(latest_checkpoint(dir_, skipped), good);
    ASSERT_EQ(skipped.size(), 5U);
    EXPECT_NE(skipped[0].find(half_manifest), std::string::npos) << skipped[0];
    EXPECT_NE(skipped[1].find(missing + "/state.json"), std::string::npos) << skipped[1];
    EXPECT_NE(skipped[2].find("not finished"), std::string::npos) << skipped[2];
    EXPECT_NE(skipped[3].find("checksum"), std::string::npos) << skipped[3];
    EXPECT_NE(skipped[4].find("bytes, the manifest says"), std::string::npos) << skipped[4];
}

TEST_F(Checkpoints, PruningKeepsTheNewestAndWhatIsNotComplete) {
    for (const std::int64_t step : {1, 2, 3, 4, 9}) {
        save(step);
    }
    fs::remove(dir_ + "/step-00000001/manifest.json");
    prune_checkpoints(dir_, 4, 2);
    EXPECT_TRUE(exists("run/step-00000001"));  // not complete: someone may want to look at it
    EXPECT_FALSE(exists("run/step-00000002"));
    EXPECT_TRUE(exists("run/step-00000003"));
    EXPECT_TRUE(exists("run/step-00000004"));
    EXPECT_TRUE(exists("run/step-00000009"));  // newer
    prune_checkpoints(dir_, 4, 1);
    EXPECT_FALSE(exists("run/step-00000003"));
    EXPECT_TRUE(exists("run/step-00000004"));
}

TEST_F(Checkpoints, ARunThatStartsAnewSetsOlderOnesAside) {
    save(1);
    save(2);
    EXPECT_EQ(set_checkpoints_aside(dir_), 2);
    EXPECT_TRUE(exists("run/replaced-step-00000002/manifest.json"));
    std::vector<std::string> skipped;
    EXPECT_FALSE(latest_checkpoint(dir_, skipped).has_value());
    save(2);
    EXPECT_EQ(set_checkpoints_aside(dir_), 1);
}

TEST_F(Checkpoints, AnotherModelIsRefusedByTensor) {
    const std::string folder = save(1);
    const ModelConfig config = read_model_config(kModelFolder);
    const auto refusal = [&](const ModelConfig& other_config) {
        const HybridModel other = HybridModel::random(other_config, 0, at::kFloat, at::kCPU);
        AdamW optimizer(whole_pieces(other.parameters()), {});
        return message_of([&] { (void)load_checkpoint(folder, other, optimizer); });
    };
    ModelConfig wide = config;
    wide.intermediate_size += 8;
    EXPECT_NE(
        refusal(wide).find("tensor model.layers.0.mlp.gate_proj.weight is [40, 64], but [48, 64]"),
        std::string::npos)
        << refusal(wide);
    EXPECT_NE(refusal(with_num_layers(config, 3)).find("tensor model.layers.3."),
              std::string::npos);
    ModelConfig deep = config;
    deep.layer_types.push_back(LayerType::kLinearAttention);
    EXPECT_NE(refusal(deep).find("has no tensor model.layers.4."), std::string::npos);
}

TEST_F(Checkpoints, AFolderThatCannotBeWrittenIsNamed) {
    const std::string file = folder_.write("file", "x");
    EXPECT_NE(message_of([&] {
                  (void)save_checkpoint(file + "/run", model_, optimizer_, {.step = 1});
              }).find(file),
              std::string::npos);
}

}  // namespace
}  // namespace hybridcp
