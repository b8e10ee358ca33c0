#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/checksum.h"
#include "core/files.h"
#include "core/folder_lock.h"
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

TEST_F(Files, AreReadByRanges) {
    const std::string path = folder_ / "a";
    write_file_atomically(path, "0123456789");
    const InputFile file(path);
    std::string text(4, ' ');
    file.read(3, text.data(), text.size());
    EXPECT_EQ(text, "3456");
    EXPECT_EQ(file.checksum(3, 4), xxh64("3456", 4));
    try {
        file.read(8, text.data(), text.size());
        FAIL() << "read beyond the end";
    } catch (const FormatError& error) {
        EXPECT_NE(std::string(error.what()).find("at byte 10: the file ends there"),
                  std::string::npos)
            << error.what();
    }
    EXPECT_THROW(InputFile(folder_.string()), FormatError);
}

// Reference values from the author's library, of bytes (7 i + 3) mod 256.
TEST(Checksum, IsXxh64WhateverThePieces) {
    const std::vector<std::pair<std::size_t, std::string>> known{
        {0, "ef46db3751d8e999"},   {1, "1f25c8d0bc1f4bb6"},   {3, "31d2363f52e564c9"},
        {4, "9bb64b7d66ee9fda"},   {7, "9a7b149959ce60d8"},   {8, "dab99d95c6f90092"},
        {15, "1b47cb8243cc8e32"},  {31, "a2aa5f33cc4a6119"},  {32, "23c3c17ef790fd97"},
        {33, "50a7cfc7ba588784"},  {63, "5e3e54b431c7493c"},  {64, "0eb64b3ef6eeb01f"},
        {100, "a61f8d4c170fe531"}, {1000, "5f235fa033f1a3fb"}};
    for (const auto& [size, expected] : known) {
        std::vector<std::uint8_t> bytes(size);
        for (std::size_t i = 0; i < size; ++i) {
            bytes[i] = static_cast<std::uint8_t>(7 * i + 3);
        }
        EXPECT_EQ(checksum_text(xxh64(bytes.data(), size)), expected) << size;
        for (const std::size_t piece : {1U, 5U, 31U, 33U}) {
            Xxh64 sum;
            for (std::size_t begin = 0; begin < size; begin += piece) {
                sum.update(bytes.data() + begin, std::min(piece, size - begin));
            }
            EXPECT_EQ(checksum_text(sum.digest()), expected) << size << " by " << piece;
        }
    }
}

TEST_F(Files, ALockedFolderNamesItsHolder) {
    auto lock = std::make_unique<FolderLock>(folder_, "lock");
    try {
        const FolderLock second(folder_, "lock");
        FAIL() << "locked twice";
    } catch (const UsageError& error) {
        EXPECT_NE(std::string(error.what())
                      .find("in use by another run (process " + std::to_string(::getpid())),
                  std::string::npos)
            << error.what();
    }
    lock.reset();
    const FolderLock again(folder_, "lock");
}

TEST_F(Files, ALockEndsWithAProcessThatIsKilled) {
    const pid_t child = ::fork();
    if (child == 0) {
        const FolderLock lock(folder_, "lock");
        ::raise(SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status));
    EXPECT_NE(read_file(folder_ / "lock").find("process " + std::to_string(child)),
              std::string::npos);
    const FolderLock lock(folder_, "lock");
}

TEST(ReadFile, AFolderIsNotAnEmptyFile) {
    EXPECT_THROW((void)read_file("/tmp"), FormatError);
    EXPECT_EQ(read_file("/dev/null"), "");
}

}  // namespace
}  // namespace hybridcp
