// The format and its guarantees: bits come back on any ranks, damage is named, folders are complete
// or not there.
#include "train/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <mutex>
#include <nlohmann/json.hpp>

#include "checkpoint_cases.h"
#include "core/files.h"
#include "hybridcp/error.h"
#include "train/checkpoint_folders.h"

namespace hybridcp {
namespace {

namespace fs = std::filesystem;
using testing::Bits;
using testing::bits_of;
using testing::equal_bits;
using testing::Keeping;
using testing::make_trained;
using testing::message_of;
using testing::run_mesh;
using testing::TemporaryFolder;
using testing::update_once;

class Checkpoints : public ::testing::Test {
  protected:
    /// Two updates on the ranks, then a save as `step`.
    std::string save(std::int64_t step, const Keeping& ranks = {}) {
        std::string folder;
        run_mesh(
            ranks.dp, ranks.cp,
            [&](const Mesh& mesh) {
                TrainedModel trained = make_trained(config_, mesh, ranks.shard_size > 1);
                update_once(trained.optimizer(), 0.5);
                update_once(trained.optimizer(), static_cast<double>(step));
                const std::string path = save_checkpoint(dir_, mesh, config_, trained.optimizer(),
                                                         {.step = step,
                                                          .consumed_rows = 4 * step,
                                                          .data_fingerprint = "d",
                                                          .topology = "t"});
                if (mesh.world->rank() == 0) {
                    folder = path;
                }
            },
            ranks.shard_size);
        return folder;
    }
    /// Loads on one rank.
    Bits load(const std::string& folder) {
        Bits bits;
        run_mesh(1, 1, [&](const Mesh& mesh) {
            TrainedModel trained = make_trained(config_, mesh, false, 9);
            state_ = load_checkpoint(folder, config_, trained.optimizer());
            bits = bits_of(trained.optimizer());
        });
        return bits;
    }
    [[nodiscard]] bool exists(const std::string& name) const { return fs::exists(folder_ / name); }
    [[nodiscard]] static std::vector<std::string> parts(const std::string& folder) {
        std::vector<std::string> found;
        for (const auto& entry : fs::directory_iterator(folder)) {
            if (entry.path().filename().string().starts_with("part-")) {
                found.push_back(entry.path());
            }
        }
        std::sort(found.begin(), found.end());
        return found;
    }
    static void flip_byte(const std::string& path, std::int64_t from_end) {
        std::string content = read_file(path);
        char& byte = content[content.size() - static_cast<std::size_t>(from_end)];
        byte = static_cast<char>(byte ^ 1);
        std::ofstream(path, std::ios::binary) << content;
    }

    TemporaryFolder folder_;
    std::string dir_ = folder_ / "run";
    ModelConfig config_ = read_model_config(testing::kModelFolder);
    TrainState state_;
};

TEST_F(Checkpoints, AreReadBackBitByBit) {
    Bits expected;
    run_mesh(1, 1, [&](const Mesh& mesh) {
        TrainedModel trained = make_trained(config_, mesh, false);
        update_once(trained.optimizer(), 0.5);
        update_once(trained.optimizer(), 1.0);
        expected = bits_of(trained.optimizer());
    });
    const std::string folder = save(1);
    EXPECT_EQ(folder, dir_ + "/step-00000001");
    EXPECT_EQ(checkpoint_damage(folder), std::nullopt);
    EXPECT_TRUE(equal_bits(load(folder), expected));
    EXPECT_EQ(state_.step, 1);
    EXPECT_EQ(state_.consumed_rows, 4);
    EXPECT_EQ(state_.data_fingerprint, "d");
    EXPECT_EQ(state_.topology, "t");
    const CheckpointReader reader(folder);
    const std::string name = "model.embed_tokens.weight";
    EXPECT_TRUE(at::equal(reader.value(name), expected.at(name)[0]));
}

TEST_F(Checkpoints, AnyRanksReadWhatAnyOthersWrote) {
    const Bits expected = load(save(1));
    const std::vector<Keeping> all{{1, 1, 1}, {2, 1, 1}, {1, 3, 1}, {1, 2, 2}, {1, 3, 3},
                                   {2, 2, 4}, {2, 2, 2}, {1, 5, 5}, {2, 4, 8}, {4, 2, 2}};
    for (std::size_t i = 0; i < all.size(); ++i) {
        fs::remove_all(dir_);
        const std::string folder = save(1, all[i]);
        EXPECT_TRUE(equal_bits(load(folder), expected)) << i;
        EXPECT_EQ(parts(folder).size(), static_cast<std::size_t>(all[i].dp * all[i].cp)) << i;
        const Keeping& other = all[(i + 3) % all.size()];
        std::mutex mutex;
        std::map<std::string, std::int64_t> elements;  // of one replica
        run_mesh(
            other.dp, other.cp,
            [&](const Mesh& mesh) {
                EXPECT_EQ(shared_checkpoint_damage(mesh, folder), std::nullopt);
                TrainedModel trained = make_trained(config_, mesh, other.shard_size > 1, 9);
                EXPECT_EQ(load_checkpoint(folder, config_, trained.optimizer()).step, 1);
                EXPECT_EQ(trained.optimizer().num_updates(), 1);
                const std::lock_guard lock(mutex);
                for (const auto& [name, tensors] : bits_of(trained.optimizer())) {
                    const auto& pieces = trained.pieces();
                    const auto piece = std::find_if(
                        pieces.begin(), pieces.end(),
                        [&, &wanted = name](const auto& p) { return p.name == wanted; });
                    for (std::size_t kind = 0; kind < tensors.size(); ++kind) {
                        const at::Tensor whole = expected.at(name)[kind].view({-1});
                        EXPECT_TRUE(at::equal(tensors[kind].view({-1}),
                                              whole.narrow(0, piece->begin, piece->value.numel())))
                            << name;
                    }
                    elements[name] += mesh.replicas->rank() == 0 ? piece->value.numel() : 0;
                }
            },
            other.shard_size);
        for (const auto& [name, tensors] : expected) {
            EXPECT_EQ(elements[name], tensors[0].numel()) << name;
        }
    }
}

TEST_F(Checkpoints, RanksWriteEqualSharesOfWhatTheyAllKeep) {
    const std::string folder = save(1, {.dp = 1, .cp = 3});
    const auto files = parts(folder);
    ASSERT_EQ(files.size(), 3U);
    const auto largest = static_cast<double>(fs::file_size(files[0]));
    for (const std::string& file : files) {
        EXPECT_NEAR(static_cast<double>(fs::file_size(file)) / largest, 1.0, 0.05) << file;
    }
    // More ranks than elements: those without have no part.
    const at::Tensor five = at::arange(5, at::kFloat);
    std::int64_t next = 0;
    for (int rank = 0; rank < 7; ++rank) {
        for (const auto& piece : share_of_pieces({{.name = "a", .value = five}}, rank, 7)) {
            EXPECT_EQ(piece.begin, next);
            next = piece.end();
        }
    }
    EXPECT_EQ(next, 5);
}

TEST_F(Checkpoints, TornAndDamagedOnesAreSkippedAndReported) {
    std::vector<std::string> skipped;
    EXPECT_FALSE(latest_checkpoint(dir_, skipped).has_value());
    const Keeping two{.cp = 2};
    const std::string good = save(1, two);
    const std::string cut = parts(save(2, two))[0];
    fs::resize_file(cut, 1000);
    const std::string flipped = parts(save(3, two))[1];
    flip_byte(flipped, 100);
    const std::string header = parts(save(4, two))[1];
    flip_byte(header, static_cast<std::int64_t>(fs::file_size(header)) - 20);
    const std::string unfinished = save(5, two);
    fs::remove(unfinished + "/manifest.json");
    const std::string missing = parts(save(6, two))[1];
    fs::remove(missing);
    const std::string state = save(7, two) + "/state.json";
    std::ofstream(state, std::ios::app) << " ";
    const std::string manifest = save(8, two) + "/manifest.json";
    std::string text = read_file(manifest);
    text.replace(text.find("\"begin\": 0"), 10, "\"begin\": 1");
    std::ofstream(manifest) << text;
    fs::create_directories(dir_ + "/step-00000009.tmp");  // a crash before the rename

    EXPECT_EQ(latest_checkpoint(dir_, skipped), good);
    const std::vector<std::string> reasons{manifest + ": its content does not have its checksum",
                                           state + ": ",
                                           missing + ": the file is missing",
                                           unfinished + ": no manifest.json",
                                           header + ": header, bytes 0 to ",
                                           flipped + ": tensor exp_avg_sq.",
                                           cut + ": cut at byte 1000 of "};
    ASSERT_EQ(skipped.size(), reasons.size());
    for (std::size_t i = 0; i < reasons.size(); ++i) {
        EXPECT_EQ(skipped[i].find(reasons[i]), 0U) << skipped[i] << "\n" << reasons[i];
    }
    run_mesh(3, 1, [&](const Mesh& mesh) {
        std::vector<std::string> shared;
        EXPECT_EQ(shared_latest_checkpoint(
                      mesh, dir_, [&](const std::string& reason) { shared.push_back(reason); }),
                  good);
        EXPECT_EQ(shared.size(), skipped.size());
        EXPECT_EQ(shared.back().find(cut + ": cut at byte 1000"), 0U) << shared.back();
    });
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

TEST_F(Checkpoints, WhatADeadSaveLeftIsTidied) {
    const std::string folder = save(1);
    const Bits expected = load(folder);
    fs::create_directories(dir_ + "/step-00000002.tmp/inside");
    fs::rename(folder, folder + ".old");  // killed between the two renames of a replacement
    tidy_checkpoints(dir_);
    EXPECT_FALSE(exists("run/step-00000002.tmp"));
    EXPECT_TRUE(equal_bits(load(folder), expected));
    fs::copy(folder, folder + ".old");  // killed after them
    save(1, {.cp = 2});
    EXPECT_FALSE(exists("run/step-00000001.old"));
    EXPECT_EQ(parts(folder).size(), 2U);
    EXPECT_TRUE(equal_bits(load(folder), expected));
}

TEST_F(Checkpoints, ARunThatStartsAnewSetsOlderOnesAside) {
    save(1);
    save(2);
    EXPECT_EQ(set_checkpoints_aside(dir_, -1), 2);
    EXPECT_TRUE(exists("run/replaced-step-00000002/manifest.json"));
    std::vector<std::string> skipped;
    EXPECT_FALSE(latest_checkpoint(dir_, skipped).has_value());
    save(2);
    EXPECT_EQ(set_checkpoints_aside(dir_, -1), 1);
}

TEST_F(Checkpoints, LaterOnesAreSetAside) {
    const std::string first = save(1);
    save(2);
    save(3);
    EXPECT_EQ(set_checkpoints_aside(dir_, 1), 2);
    std::vector<std::string> skipped;
    EXPECT_EQ(latest_checkpoint(dir_, skipped), first);
    EXPECT_TRUE(skipped.empty());
}

TEST_F(Checkpoints, AnotherStepsNameIsDamage) {
    const std::string good = save(1);
    fs::rename(save(2), dir_ + "/step-00000009");
    std::vector<std::string> skipped;
    EXPECT_EQ(latest_checkpoint(dir_, skipped), good);
    ASSERT_EQ(skipped.size(), 1U);
    EXPECT_NE(skipped[0].find("step-00000009: holds step 2"), std::string::npos) << skipped[0];
}

TEST_F(Checkpoints, WhatCannotBeListedIsNoEmptyFolder) {
    EXPECT_TRUE(list_checkpoints(dir_ + "/nothing").empty());
    fs::create_directories(dir_);
    std::ofstream(dir_ + "/file") << "text";
    EXPECT_THROW((void)list_checkpoints(dir_ + "/file"), FormatError);
}

TEST_F(Checkpoints, APipeInPlaceOfAPartIsDamage) {
    const std::string part = parts(save(1))[0];
    fs::remove(part);
    ASSERT_EQ(::mkfifo(part.c_str(), 0600), 0);
    std::vector<std::string> skipped;
    EXPECT_FALSE(latest_checkpoint(dir_, skipped).has_value());
    ASSERT_EQ(skipped.size(), 1U);
    EXPECT_NE(skipped[0].find("not a regular file"), std::string::npos) << skipped[0];
}

TEST_F(Checkpoints, AnotherModelIsRefusedByTensor) {
    const std::string folder = save(1);
    const auto refusal = [&](const ModelConfig& other_config) {
        std::string message;
        run_mesh(1, 1, [&](const Mesh& mesh) {
            TrainedModel other = make_trained(other_config, mesh, false);
            message =
                message_of([&] { (void)load_checkpoint(folder, other_config, other.optimizer()); });
        });
        return message;
    };
    ModelConfig wide = config_;
    wide.intermediate_size += 8;
    EXPECT_NE(
        refusal(wide).find("tensor model.layers.0.mlp.gate_proj.weight is [40, 64], but [48, 64]"),
        std::string::npos)
        << refusal(wide);
    EXPECT_NE(refusal(with_num_layers(config_, 3)).find("tensor model.layers.3."),
              std::string::npos);
    ModelConfig deep = config_;
    deep.layer_types.push_back(LayerType::kLinearAttention);
    EXPECT_NE(refusal(deep).find("has no tensor model.layers.4."), std::string::npos);
}

TEST_F(Checkpoints, AFolderThatCannotBeWrittenIsNamedOnEveryRank) {
    dir_ = folder_.write("file", "x") + "/run";
    std::vector<std::string> messages(2);
    run_mesh(1, 2, [&](const Mesh& mesh) {
        TrainedModel trained = make_trained(config_, mesh, false);
        messages[static_cast<std::size_t>(mesh.world->rank())] = message_of(
            [&] { (void)save_checkpoint(dir_, mesh, config_, trained.optimizer(), {.step = 1}); });
    });
    EXPECT_NE(messages[0].find(dir_), std::string::npos) << messages[0];
    EXPECT_EQ(messages[0], messages[1]);
}

TEST_F(Checkpoints, AFolderOfRankZeroAloneIsNamed) {
    const std::string other = folder_ / "other";
    fs::create_directories(dir_);
    fs::create_directories(other);
    run_mesh(1, 3, [&](const Mesh& mesh) {
        check_shared_folder(mesh, dir_);
        EXPECT_EQ(std::distance(fs::directory_iterator(dir_), {}), 0);
    });
    run_mesh(1, 3, [&](const Mesh& mesh) {
        const std::string message = message_of([&] {
            check_shared_folder(mesh, mesh.world->rank() == 2 ? other : dir_,
                                std::chrono::milliseconds(300));
        });
        EXPECT_NE(message.find("rank 2 does not see the folder " + other), std::string::npos)
            << message;
    });
}

}  // namespace
}  // namespace hybridcp
