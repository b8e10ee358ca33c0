#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <string>

#include "core/files.h"
#include "hybridcp/error.h"

namespace hybridcp {
namespace {

TEST(Error, ExitStatusSeparatesWrongRequestsFromFailedRuns) {
    EXPECT_EQ(UsageError("x").exit_status(), 2);
    EXPECT_EQ(FormatError("x").exit_status(), 2);
    EXPECT_EQ(CommError("x").exit_status(), 1);
    EXPECT_EQ(NumericsError("x").exit_status(), 1);
}

TEST(Error, ACheckPrintsBothValuesAndTheHint) {
    try {
        HCP_CHECK_EQ(3, 4, "num_heads of {}", "q");
        FAIL() << "the check passed";
    } catch (const UsageError& error) {
        EXPECT_EQ(std::string(error.what()), "num_heads of q: expected 3 == 4, got 3 against 4");
    }
}

TEST(Error, NearestWordIsByEditDistance) {
    const std::array<const char*, 3> known{"steps", "seed", "optimizer"};
    EXPECT_EQ(nearest_word("optimiser", known), "optimizer");
    EXPECT_EQ(nearest_word("step", known), "steps");
    EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
}

class Files : public testing::Test {
  protected:
    void SetUp() override {
        folder_ =
            std::filesystem::temp_directory_path() /
            ("hcp_files_" + std::to_string(::testing::UnitTest::GetInstance()->random_seed()) +
             ::testing::UnitTest::GetInstance()->current_test_info()->name());
        std::filesystem::create_directories(folder_);
    }
    void TearDown() override { std::filesystem::remove_all(folder_); }
    std::filesystem::path folder_;
};

TEST_F(Files, AnUncommittedFileLeavesTheOldOneAndNoTemporary) {
    const std::string path = folder_ / "a.json";
    write_file_atomically(path, "old");
    {
        AtomicFile file(path);
        file.write("half", 4);
    }
    EXPECT_EQ(read_file(path), "old");
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

TEST_F(Files, AMissingFolderIsNamed) {
    try {
        write_file_atomically(folder_ / "no" / "a.json", "x");
        FAIL() << "wrote into a folder that does not exist";
    } catch (const FormatError& error) {
        EXPECT_NE(std::string(error.what()).find("No such file"), std::string::npos)
            << error.what();
    }
}

}  // namespace
}  // namespace hybridcp
