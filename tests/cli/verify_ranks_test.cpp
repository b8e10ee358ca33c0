// `hcp verify model` and `verify trajectory` over local ranks, and the ways in which ranks start
// and end.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "cli/process.h"

namespace hybridcp::testing {
namespace {

std::vector<std::string> model_words(const std::string& model,
                                     const std::string& name,
                                     const std::vector<std::string>& rest) {
    const std::string folder = golden("models/" + model);
    std::vector<std::string> words = {"verify",
                                      "model",
                                      folder,
                                      "--batch",
                                      folder + "/" + name + "/batch.safetensors",
                                      "--expected",
                                      folder + "/" + name + "/expected.safetensors"};
    words.insert(words.end(), rest.begin(), rest.end());
    return words;
}

std::vector<std::string> on_ranks(int num_ranks,
                                  const std::string& mode,
                                  const std::string& full_mode = "all_gather") {
    return {"--nproc", std::to_string(num_ranks),
            "train.accelerator.linear_attention_cp_mode=" + mode,
            "train.accelerator.full_attention_cp_mode=" + full_mode};
}

TEST(VerifyModel, OneRank) {
    for (const auto& [model, name] : std::vector<std::pair<std::string, std::string>>{
             {"dense_tiny", "b1_t256"},
             {"dense_tiny", "packed"},
             {"dense_tiny8", "b1_t100"},
             {"vl_mini", "b2_t33"},
             {"moe_tiny", "b2_t130"},
             {"moe_tiny", "packed"},
             {"moe_vl_mini", "b2_t33"},
             {"moe_vl_mini_per_expert", "../moe_vl_mini/b2_t33"},
             {"dense_mini_bf16", "b2_t70"}}) {
        const Outcome outcome = run_hcp(model_words(model, name, {}));
        EXPECT_EQ(outcome.status, 0) << outcome.output;
    }
}

TEST(VerifyModel, ManyRanks) {
    for (const auto& [num_ranks, mode, full_mode] :
         std::vector<std::tuple<int, std::string, std::string>>{{2, "ulysses", "all_gather"},
                                                                {2, "all_gather", "ring"},
                                                                {3, "p2p", "ring"},
                                                                {3, "all_gather", "all_gather"}}) {
        std::vector<std::string> rest = on_ranks(num_ranks, mode, full_mode);
        rest.emplace_back("--against-one-rank");
        const Outcome outcome = run_hcp(model_words("dense_tiny", "packed", rest));
        EXPECT_EQ(outcome.status, 0) << outcome.output;
        EXPECT_EQ(count(outcome.output, "verified:"), 1U) << outcome.output;
        EXPECT_NE(outcome.output.find("one rank"), std::string::npos) << outcome.output;
    }
    const Outcome heads = run_hcp(model_words("vl_mini", "b2_t33", on_ranks(3, "ulysses")));
    EXPECT_EQ(heads.status, 2) << heads.output;  // two value heads on three ranks
}

// The packed case was recorded with a coefficient that its manifest has, not config.json.
TEST(VerifyModel, LoadBalancingLoss) {
    std::vector<std::string> rest = on_ranks(4, "p2p");
    rest.emplace_back("--against-one-rank");
    const Outcome ranks = run_hcp(model_words("moe_tiny", "packed", rest));
    EXPECT_EQ(ranks.status, 0) << ranks.output;
    EXPECT_EQ(count(ranks.output, "loss = ce_loss + 0.1 aux_loss"), 1U) << ranks.output;
    const Outcome other =
        run_hcp(model_words("moe_tiny", "packed", {"--router-aux-loss-coef", "0.001"}));
    EXPECT_EQ(other.status, 1) << other.output;
    const Outcome dense =
        run_hcp(model_words("dense_tiny", "packed", {"--router-aux-loss-coef", "0.1"}));
    EXPECT_EQ(dense.status, 2) << dense.output;
}

TEST(VerifyModel, Bf16NeedsAFigure) {
    const Outcome outcome = run_hcp(model_words("dense_mini_bf16", "b2_t70", {"--dtype", "bf16"}));
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    const Outcome none = run_hcp(model_words("dense_tiny", "packed", {"--dtype", "bf16"}));
    EXPECT_EQ(none.status, 2) << none.output;
}

// Another case's numbers must not pass, and every rank must say so by its exit status.
TEST(VerifyModel, CanFail) {
    const ScratchFolder folder;
    const std::string model = golden("models/dense_tiny");
    std::string bytes = read_text(model + "/packed/expected.safetensors");
    std::uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
    const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
    const auto range = header.at("grad.model.layers.1.linear_attn.A_log").at("data_offsets");
    std::memset(bytes.data() + 8 + header_bytes + range.at(0).get<std::size_t>(), 0, 4);
    write_text(folder / "expected.safetensors", bytes);
    std::vector<std::string> words = {"verify",
                                      "model",
                                      model,
                                      "--batch",
                                      model + "/packed/batch.safetensors",
                                      "--expected",
                                      folder / "expected.safetensors",
                                      "--report",
                                      folder / "report.json"};
    const auto rest = on_ranks(2, "p2p");
    words.insert(words.end(), rest.begin(), rest.end());
    const Outcome outcome = run_hcp(words);
    EXPECT_EQ(outcome.status, 1) << outcome.output;
    const auto report = nlohmann::json::parse(read_text(folder / "report.json"));
    for (const auto& row : report.at("reports").at(0).at("rows")) {
        const std::string tensor = row.at("tensor");
        const bool touched = tensor == "grad.model.layers.1.linear_attn.A_log";
        EXPECT_TRUE(row.at("passed").get<bool>() != touched || tensor == "all gradients") << row;
    }
}

TEST(VerifyTrajectory, DataAndContextParallel) {
    const std::vector<std::string> words = {"verify",
                                            "trajectory",
                                            golden("trajectories/dense_tiny"),
                                            "--model",
                                            golden("models/dense_tiny"),
                                            "--nproc",
                                            "4",
                                            "train.accelerator.dp=2",
                                            "train.accelerator.linear_attention_cp_mode=p2p"};
    const Outcome outcome = run_hcp(words);
    EXPECT_EQ(outcome.status, 0) << outcome.output;
}

int free_port() {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
    close(listener);
    return ntohs(address.sin_port);
}

// As torchrun without a store of its own, Slurm and Open MPI start ranks: variables only.
TEST(Launch, VariablesOfOtherLaunchers) {
    const std::vector<std::vector<std::string>> launchers = {
        {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
        {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"}};
    for (const auto& names : launchers) {
        const std::string port = std::to_string(free_port());
        const auto words = model_words("vl_mini", "b2_t33",
                                       {"train.accelerator.full_attention_cp_mode=all_gather",
                                        "train.accelerator.linear_attention_cp_mode=p2p"});
        const auto environment = [&](const std::string& rank) {
            return std::map<std::string, std::string>{{names[0], rank},
                                                      {names[1], "2"},
                                                      {names[2], rank},
                                                      {"MASTER_ADDR", "127.0.0.1"},
                                                      {"MASTER_PORT", port}};
        };
        HcpProcess first(words, environment("0"));
        HcpProcess second(words, environment("1"));
        EXPECT_EQ(first.wait(), 0) << first.output();
        EXPECT_EQ(second.wait(), 0) << second.output();
        EXPECT_EQ(count(first.output(), "verified:"), 1U);
        EXPECT_EQ(second.output(), "");
    }
}

}  // namespace
}  // namespace hybridcp::testing
