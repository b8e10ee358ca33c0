// Faults while a checkpoint is saved, and of what lies on the disk: the last complete one is found
// and has its bits, and what is damaged is named.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <iostream>
#include <random>

#include "checkpoint_cases.h"
#include "core/files.h"
#include "hybridcp/error.h"
#include "train/checkpoint_folders.h"
#include "train/file_faults.h"

namespace hybridcp {
namespace {

namespace fs = std::filesystem;
using testing::Bits;
using testing::ChildResult;
using testing::equal_bits;
using testing::Fault;
using testing::Keeping;
using testing::run_mesh;
using testing::run_with_fault;
using testing::TemporaryFolder;

constexpr Keeping kRanks{.dp = 1, .cp = 2, .shard_size = 2};

/// Step 1 has been saved by two ranks in `dir_`; this process has one thread, and forks.
class CheckpointFaults : public ::testing::Test {
  protected:
    void SetUp() override {
        fs::create_directories(dir_);
        ASSERT_EQ(save_with(Fault::kNone, 0, 1, 1.0).error, "");
        fs::copy(dir_, pristine_, fs::copy_options::recursive);
        first_ = updated(1.0);
        second_ = updated(2.0);
        ASSERT_TRUE(equal_bits(load(step(1)), first_));
    }

    void TearDown() override { std::cout << num_faults_ << " faults\n"; }

    [[nodiscard]] std::string step(std::int64_t number) const { return step_folder(dir_, number); }
    void restore() {
        fs::remove_all(dir_);
        fs::copy(pristine_, dir_, fs::copy_options::recursive);
    }

    /// What two ranks save after an update with `factor`.
    void save(std::int64_t number, double factor) {
        run_mesh(
            kRanks.dp, kRanks.cp,
            [&](const Mesh& mesh) {
                TrainedModel trained = testing::make_trained(config_, mesh, kRanks.shard_size > 1);
                testing::update_once(trained.optimizer(), factor);
                (void)save_checkpoint(dir_, mesh, config_, trained.optimizer(),
                                      {.step = number, .consumed_rows = number});
            },
            kRanks.shard_size);
    }
    ChildResult save_with(Fault fault, std::int64_t target, std::int64_t number, double factor) {
        return run_with_fault(fault, target, [&] { save(number, factor); });
    }

    // On this thread: libtorch's pool, which a rank of run_mesh makes, does not survive a fork.
    Bits updated(double factor) {
        TrainedModel trained = testing::make_trained(config_, alone_, false);
        testing::update_once(trained.optimizer(), factor);
        return testing::bits_of(trained.optimizer());
    }
    Bits load(const std::string& folder) {
        TrainedModel trained = testing::make_trained(config_, alone_, false, 9);
        (void)load_checkpoint(folder, config_, trained.optimizer());
        return testing::bits_of(trained.optimizer());
    }

    /// As a run that starts does. The newest checkpoint, which must have the bits of a save, and
    /// the damage of those that are skipped.
    std::string resume(std::vector<std::string>* skipped = nullptr) {
        std::vector<std::string> lines;
        tidy_checkpoints(dir_);
        const std::string found = latest_checkpoint(dir_, lines).value_or("none");
        if (skipped != nullptr) {
            *skipped = lines;
        } else {
            EXPECT_TRUE(lines.empty()) << "not complete, but has the name: " << lines[0];
        }
        ++num_faults_;
        return found;
    }

    /// A fault at every operation of a save of `number`.
    void fault_everywhere(Fault fault, std::int64_t number) {
        const bool kills = fault == Fault::kKill || fault == Fault::kKillHalfWay;
        restore();
        const std::int64_t count = save_with(Fault::kNone, 0, number, 2.0).num_operations;
        ASSERT_GT(count, 40);
        std::int64_t num_unnamed = 0;
        for (std::int64_t target = 0; target < count; ++target) {
            SCOPED_TRACE(fmt::format("operation {} of {}", target, count));
            restore();
            const ChildResult result = save_with(fault, target, number, 2.0);
            EXPECT_EQ(result.was_killed, kills);
            const std::string found = resume();
            const Bits bits = load(found);
            if (equal_bits(bits, second_)) {
                EXPECT_EQ(found, step(number));
            } else {
                EXPECT_EQ(found, step(1));
                EXPECT_TRUE(equal_bits(bits, first_));
                EXPECT_TRUE(kills || !result.error.empty()) << "failed without a word";
                ++num_unnamed;
            }
            if (!kills && !result.error.empty()) {
                EXPECT_NE(result.error.find(dir_), std::string::npos) << result.error;
                EXPECT_EQ(result.error.find('\n'), std::string::npos) << result.error;
            }
        }
        EXPECT_GT(num_unnamed, count / 2);
        EXPECT_EQ(save_with(Fault::kNone, 0, number, 2.0).error, "");
        EXPECT_TRUE(equal_bits(load(resume()), second_));
        for (const auto& entry : fs::directory_iterator(dir_)) {
            EXPECT_EQ(entry.path().filename().string().find(".tmp"), std::string::npos);
        }
    }

    /// Changes one file of step 2 at a time; `change` gets its path and says if it is damaged.
    void damage_files(int rounds, const std::function<bool(const std::string&)>& change) {
        ASSERT_EQ(save_with(Fault::kNone, 0, 2, 2.0).error, "");
        std::vector<std::string> files;
        for (const auto& entry : fs::directory_iterator(step(2))) {
            files.push_back(entry.path().filename());
        }
        ASSERT_EQ(files.size(), 5U);
        for (int round = 0; round < rounds; ++round) {
            for (const std::string& name : files) {
                const std::string path = step(2) + "/" + name;
                const std::string content = read_file(path);
                SCOPED_TRACE(fmt::format("{}, round {}", name, round));
                const bool damaged = change(path);
                std::vector<std::string> skipped;
                const std::string found = resume(&skipped);
                if (damaged || found == step(1)) {
                    EXPECT_EQ(found, step(1));
                    ASSERT_EQ(skipped.size(), 1U);
                    EXPECT_NE(skipped[0].find(name), std::string::npos) << skipped[0];
                    EXPECT_EQ(skipped[0].find('\n'), std::string::npos) << skipped[0];
                    EXPECT_TRUE(equal_bits(load(found), first_));
                } else {
                    EXPECT_TRUE(equal_bits(load(found), second_));
                }
                std::ofstream(path, std::ios::binary) << content;
            }
        }
        EXPECT_EQ(resume(), step(2));
    }

    TemporaryFolder folder_;
    std::string dir_ = folder_ / "run";
    std::string pristine_ = folder_ / "pristine";
    ModelConfig config_ = with_num_layers(read_model_config(testing::kModelFolder), 1);
    Mesh alone_ = make_mesh(nullptr, {});
    Bits first_, second_;
    std::int64_t num_faults_ = 0;
    std::mt19937_64 random_{6};
};

// What no kill shows: a name that reaches the disk before what it stands for.
TEST_F(CheckpointFaults, NothingHasItsNameBeforeItIsSynced) {
    const ChildResult result = save_with(Fault::kNone, 0, 2, 2.0);
    EXPECT_EQ(result.error, "");
    EXPECT_GT(result.num_operations, 40);
    EXPECT_FALSE(result.named_unsynced);
}

TEST_F(CheckpointFaults, KilledAnywhereInASave) {
    fault_everywhere(Fault::kKill, 2);
}
TEST_F(CheckpointFaults, KilledHalfWayThroughAnyWrite) {
    fault_everywhere(Fault::kKillHalfWay, 2);
}
TEST_F(CheckpointFaults, KilledAnywhereWhileOneIsReplaced) {
    fault_everywhere(Fault::kKill, 1);
}
TEST_F(CheckpointFaults, AnInputOutputErrorAnywhere) {
    fault_everywhere(Fault::kIoError, 2);
}
TEST_F(CheckpointFaults, ADiskThatIsFullFromAnyPointOn) {
    fault_everywhere(Fault::kNoSpace, 2);
}

TEST_F(CheckpointFaults, FlippedBitsAreFound) {
    damage_files(20, [&](const std::string& path) {
        std::string content = read_file(path);
        char& byte = content[random_() % content.size()];
        byte = static_cast<char>(byte ^ (1 << random_() % 8));
        std::ofstream(path, std::ios::binary) << content;
        // Of the manifest, a flip may leave the meaning (the case of a digit of its checksum).
        return !path.ends_with("manifest.json");
    });
}

TEST_F(CheckpointFaults, TruncationsAreFound) {
    damage_files(8, [&](const std::string& path) {
        const std::uint64_t size = fs::file_size(path);
        fs::resize_file(path, random_() % size);
        return !path.ends_with("manifest.json") || fs::file_size(path) + 1 < size;
    });
}

TEST_F(CheckpointFaults, MissingAndEmptyFilesAreFound) {
    damage_files(1, [](const std::string& path) { return fs::remove(path); });
    damage_files(1, [](const std::string& path) {
        fs::resize_file(path, 0);
        return true;
    });
    damage_files(1, [](const std::string& path) {
        std::ofstream(path, std::ios::app) << "more";
        return true;
    });
}

/// A small file system on a folder, as long as this lives.
class SmallFileSystem {
  public:
    SmallFileSystem(std::string folder, std::uint64_t size_bytes) : folder_(std::move(folder)) {
        fs::create_directories(folder_);
        const std::string options = fmt::format("size={}", size_bytes);
        is_mounted_ = mount("tmpfs", folder_.c_str(), "tmpfs", 0, options.c_str()) == 0;
    }
    ~SmallFileSystem() {
        if (is_mounted_) {
            umount(folder_.c_str());
        }
    }
    SmallFileSystem(const SmallFileSystem&) = delete;
    SmallFileSystem& operator=(const SmallFileSystem&) = delete;
    [[nodiscard]] bool is_mounted() const { return is_mounted_; }

  private:
    std::string folder_;
    bool is_mounted_ = false;
};

TEST_F(CheckpointFaults, AFileSystemThatIsFull) {
    std::uint64_t save_bytes = 0;
    for (const auto& entry : fs::directory_iterator(step(1))) {
        save_bytes += entry.file_size();
    }
    const SmallFileSystem small(folder_ / "small", 3 * save_bytes);
    if (!small.is_mounted()) {
        GTEST_SKIP() << "waits for a user who may mount a tmpfs (root, CAP_SYS_ADMIN)";
    }
    fs::copy(dir_, folder_ / "small/run", fs::copy_options::recursive);
    dir_ = folder_ / "small/run";
    const std::string ballast = folder_ / "small/ballast";
    std::ofstream(ballast) << std::string(fs::space(dir_).available, 'x');
    const std::uint64_t more = save_bytes / 12;
    int num_full = 0;
    for (std::uint64_t size = fs::file_size(ballast); size > more; size -= more) {
        fs::resize_file(ballast, size);
        const ChildResult result = save_with(Fault::kNone, 0, 2, 2.0);
        const std::string found = resume();
        if (result.error.empty()) {
            EXPECT_EQ(found, step(2));
            EXPECT_TRUE(equal_bits(load(found), second_));
            break;
        }
        ++num_full;
        EXPECT_NE(result.error.find("No space left on device"), std::string::npos) << result.error;
        EXPECT_EQ(found, step(1));
        EXPECT_TRUE(equal_bits(load(found), first_));
    }
    EXPECT_GE(num_full, 10);
}

TEST_F(CheckpointFaults, FilesThatMayNotGrow) {
    for (const rlim_t limit : {0U, 9U, 100U, 1000U, 5000U, 50000U}) {
        const ChildResult result = run_with_fault(Fault::kNone, 0, [&] {
            signal(SIGXFSZ, SIG_IGN);
            const rlimit size{limit, limit};
            setrlimit(RLIMIT_FSIZE, &size);
            save(2, 2.0);
        });
        EXPECT_NE(result.error.find("File too large"), std::string::npos) << result.error;
        EXPECT_EQ(resume(), step(1));
    }
}

TEST_F(CheckpointFaults, AFolderWithoutPermission) {
    // Others and the group may look, and nobody may write.
    const fs::perms look = fs::perms::group_exec | fs::perms::others_exec;
    fs::permissions(fs::path(dir_).parent_path(), look, fs::perm_options::add);
    fs::permissions(dir_, look | fs::perms::owner_read | fs::perms::owner_exec |
                              fs::perms::group_read | fs::perms::others_read);
    const ChildResult result = run_with_fault(Fault::kNone, 0, [&] {
        if (getuid() == 0 && setuid(65534) != 0) {  // root may write everywhere
            throw std::runtime_error("cannot become another user");
        }
        save(2, 2.0);
    });
    EXPECT_NE(result.error.find("cannot create " + step(2) + ".tmp: Permission denied"),
              std::string::npos)
        << result.error;
    fs::permissions(dir_, fs::perms::owner_all);
    EXPECT_EQ(resume(), step(1));
}

}  // namespace
}  // namespace hybridcp
