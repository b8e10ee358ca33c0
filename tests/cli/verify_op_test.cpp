// `hcp verify op` on every golden case, and that it can fail.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "cli/process.h"

namespace hybridcp::testing {
namespace {

std::vector<std::string> cases_of(const std::string& op) {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(golden("ops/" + op))) {
        if (entry.path().extension() == ".safetensors") {
            files.push_back(entry.path().string());
        }
    }
    std::sort(files.begin(), files.end());
    return files;
}

Outcome verify_op(const std::string& op,
                  const std::vector<std::string>& files,
                  const std::vector<std::string>& flags = {}) {
    std::vector<std::string> words = {"verify", "op", op};
    words.insert(words.end(), files.begin(), files.end());
    words.insert(words.end(), flags.begin(), flags.end());
    return run_hcp(words);
}

class VerifyOp : public ::testing::TestWithParam<std::string> {};

TEST_P(VerifyOp, EagerFp32) {
    const auto files = cases_of(GetParam());
    ASSERT_FALSE(files.empty());
    const Outcome outcome = verify_op(GetParam(), files);
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_EQ(count(outcome.output, "verdict"), files.size()) << outcome.output;
}

TEST_P(VerifyOp, ReferenceFp64) {
    const Outcome outcome = verify_op(GetParam(), cases_of(GetParam()), {"--backend", "reference"});
    EXPECT_EQ(outcome.status, 0) << outcome.output;
}

INSTANTIATE_TEST_SUITE_P(All,
                         VerifyOp,
                         ::testing::Values("gdn",
                                           "conv1d",
                                           "gated_rmsnorm",
                                           "rmsnorm_zero_centered",
                                           "rope_partial",
                                           "gated_attention",
                                           "gdn_gate",
                                           "swiglu_mlp",
                                           "moe",
                                           "cross_entropy"));

TEST(VerifyOpBf16, WithinBars) {
    for (const std::string op : {"gdn", "conv1d", "gated_rmsnorm", "rmsnorm_zero_centered"}) {
        const Outcome outcome = verify_op(op, cases_of(op), {"--dtype", "bf16"});
        EXPECT_EQ(outcome.status, 0) << outcome.output;
    }
}

TEST(VerifyOpChunk, OtherChunkSizes) {
    for (const char* chunk : {"1", "16", "33", "128"}) {
        const Outcome outcome = verify_op(
            "gdn",
            {golden("ops/gdn/cp4_varlen.safetensors"), golden("ops/gdn/strong_chain.safetensors")},
            {"--chunk", chunk});
        EXPECT_EQ(outcome.status, 0) << outcome.output;
    }
}

/// A copy of a case whose tensor `name` has its first number changed by a factor.
std::string corrupted_copy(const ScratchFolder& folder,
                           const std::string& op,
                           const std::string& name,
                           const std::string& tensor,
                           float factor) {
    std::string bytes = read_text(golden("ops/" + op + "/" + name + ".safetensors"));
    std::uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
    const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
    const std::size_t at =
        8 + header_bytes + header.at(tensor).at("data_offsets").at(0).get<std::size_t>();
    float value = 0;
    std::memcpy(&value, bytes.data() + at, sizeof(value));
    value *= factor;
    std::memcpy(bytes.data() + at, &value, sizeof(value));
    write_text(folder / "manifest.json", read_text(golden("ops/" + op + "/manifest.json")));
    write_text(folder / (name + ".safetensors"), bytes);
    return folder / (name + ".safetensors");
}

TEST(VerifyOpFails, OneWrongNumber) {
    const ScratchFolder folder;
    for (const std::string tensor :
         {"o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0", "seg.M", "seg.dS_start"}) {
        const std::string file = corrupted_copy(folder, "gdn", "cp4", tensor, 1.5F);
        const Outcome outcome = verify_op("gdn", {file, golden("ops/gdn/t1.safetensors")},
                                          {"--report", folder / "report.json"});
        EXPECT_EQ(outcome.status, 1) << outcome.output;
        const auto report = nlohmann::json::parse(read_text(folder / "report.json"));
        EXPECT_FALSE(report.at("passed").get<bool>());
        EXPECT_FALSE(report.at("reports").at(0).at("passed").get<bool>());
        EXPECT_TRUE(report.at("reports").at(1).at("passed").get<bool>());
        for (const auto& row : report.at("reports").at(0).at("rows")) {
            const bool is_wrong = row.at("tensor") == tensor ||
                                  (tensor == "o" && row.at("tensor") == "o (by segments)");
            EXPECT_EQ(row.at("passed").get<bool>(), !is_wrong) << tensor << " " << row;
        }
    }
    for (const std::string tensor : {"y", "dx", "dweight"}) {
        const std::string file = corrupted_copy(folder, "gated_rmsnorm", "d128", tensor, 1e3F);
        EXPECT_EQ(verify_op("gated_rmsnorm", {file}).status, 1) << tensor;
    }
}

TEST(VerifyOpFails, DamagedFiles) {
    const ScratchFolder folder;
    const std::string file = corrupted_copy(folder, "gdn", "t1", "o", 1.0F);
    EXPECT_EQ(verify_op("gdn", {file}).status, 0);
    std::filesystem::resize_file(file, 1000);
    const Outcome truncated = verify_op("gdn", {file});
    EXPECT_EQ(truncated.status, 2) << truncated.output;
    EXPECT_NE(truncated.output.find(file), std::string::npos) << truncated.output;
    std::filesystem::remove(file);
    EXPECT_EQ(verify_op("gdn", {file}).status, 2);
    std::filesystem::copy_file(golden("ops/gdn/t1.safetensors"), file);
    std::filesystem::remove(folder / "manifest.json");
    EXPECT_EQ(verify_op("gdn", {file}).status, 2);
}

}  // namespace
}  // namespace hybridcp::testing
