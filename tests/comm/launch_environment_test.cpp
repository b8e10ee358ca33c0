#include "comm/launch_environment.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdlib>
#include <map>
#include <utility>

#include "comm/liveness.h"
#include "hybridcp/error.h"

namespace hybridcp {
namespace {

using Variables = std::map<std::string, std::string>;

const char* const kNames[] = {"RANK",
                              "WORLD_SIZE",
                              "LOCAL_RANK",
                              "MASTER_ADDR",
                              "MASTER_PORT",
                              "TORCHELASTIC_USE_AGENT_STORE",
                              "TORCHELASTIC_RESTART_COUNT",
                              "SLURM_PROCID",
                              "SLURM_NTASKS",
                              "SLURM_LOCALID",
                              "OMPI_COMM_WORLD_RANK",
                              "OMPI_COMM_WORLD_SIZE",
                              "OMPI_COMM_WORLD_LOCAL_RANK"};

LaunchEnvironment read_with(const Variables& variables) {
    for (const char* name : kNames) {
        unsetenv(name);
    }
    for (const auto& [name, value] : variables) {
        setenv(name.c_str(), value.c_str(), 1);
    }
    return read_launch_environment();
}

// `base` with one variable changed, or without it when the value is empty.
std::string refusal(Variables base, const std::string& name, const std::string& value) {
    if (value.empty()) {
        base.erase(name);
    } else {
        base[name] = value;
    }
    try {
        (void)read_with(base);
    } catch (const UsageError& error) {
        return error.what();
    }
    return "accepted";
}

const Variables kTorchrun{{"RANK", "3"},
                          {"WORLD_SIZE", "4"},
                          {"LOCAL_RANK", "1"},
                          {"MASTER_ADDR", "node7"},
                          {"MASTER_PORT", "29501"}};
const Variables kSlurm{{"SLURM_PROCID", "3"},
                       {"SLURM_NTASKS", "4"},
                       {"SLURM_LOCALID", "1"},
                       {"MASTER_ADDR", "node7"},
                       {"MASTER_PORT", "29501"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "3"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"MASTER_ADDR", "node7"},
                         {"MASTER_PORT", "29501"}};

TEST(LaunchEnvironment, ReadsTheVariablesOfEachLauncher) {
    const std::pair<Variables, std::string> launchers[] = {
        {kTorchrun, "torchrun"}, {kSlurm, "slurm"}, {kOpenMpi, "openmpi"}};
    for (const auto& [variables, source] : launchers) {
        const LaunchEnvironment environment = read_with(variables);
        EXPECT_EQ(environment.source, source);
        EXPECT_EQ(environment.rank, 3);
        EXPECT_EQ(environment.world_size, 4);
        EXPECT_EQ(environment.local_rank, 1);
        EXPECT_EQ(environment.master_addr, "node7");
        EXPECT_EQ(environment.master_port, 29501);
        EXPECT_FALSE(environment.store_is_external);
    }
}

TEST(LaunchEnvironment, TorchrunComesFirstAndNothingIsASingleProcess) {
    Variables both = kSlurm;
    both.insert(kTorchrun.begin(), kTorchrun.end());
    both["SLURM_PROCID"] = "0";
    both["TORCHELASTIC_USE_AGENT_STORE"] = "True";
    both["TORCHELASTIC_RESTART_COUNT"] = "2";
    const LaunchEnvironment environment = read_with(both);
    EXPECT_EQ(environment.source, "torchrun");
    EXPECT_EQ(environment.rank, 3);
    EXPECT_TRUE(environment.store_is_external);
    EXPECT_EQ(environment.attempt, 2);

    const LaunchEnvironment single = read_with({{"SLURM_NTASKS", "4"}});  // in salloc, without srun
    EXPECT_EQ(single.source, "single");
    EXPECT_EQ(single.world_size, 1);
    EXPECT_EQ(single.master_port, 0);
    EXPECT_EQ(read_with({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}}).master_port, 0);
}

TEST(LaunchEnvironment, WrongValuesAreNamed) {
    const auto expect_names = [](const Variables& base, const std::string& name,
                                 const std::string& value, const std::string& why) {
        const std::string text = refusal(base, name, value);
        EXPECT_NE(text.find(name), std::string::npos) << text;
        EXPECT_NE(text.find(why), std::string::npos) << text;
    };
    for (const auto& [name, value] : kTorchrun) {
        expect_names(kTorchrun, name, "", "is not set");
    }
    for (const auto& [name, value] : kSlurm) {
        if (name != "SLURM_PROCID") {  // without it this is no Slurm task
            expect_names(kSlurm, name, "", "is not set");
        }
    }
    expect_names(kOpenMpi, "OMPI_COMM_WORLD_SIZE", "", "is not set");
    for (const char* value : {"4", "-1", "x", "1.5", "1 ", "0x1", "99999999999999999999"}) {
        expect_names(kTorchrun, "RANK", value, "must be an integer from 0 to 3");
        expect_names(kTorchrun, "LOCAL_RANK", value, "must be an integer from 0 to 3");
        expect_names(kSlurm, "SLURM_PROCID", value, "must be an integer from 0 to 3");
        expect_names(kOpenMpi, "OMPI_COMM_WORLD_RANK", value, "must be an integer from 0 to 3");
    }
    expect_names(kTorchrun, "WORLD_SIZE", "0", "must be an integer from 1");
    expect_names(kTorchrun, "MASTER_PORT", "0", "from 1 to 65535");
    expect_names(kTorchrun, "MASTER_PORT", "65536", "from 1 to 65535");
}

TEST(Store, ASingleProcessNeedsNoServer) {
    const auto store = connect_store({}, std::chrono::seconds(1));
    EXPECT_NE(dynamic_cast<c10d::HashStore*>(store.get()), nullptr);
}

TEST(Store, RanksReachTheHostedStore) {
    int port = 0;
    const auto host = host_store(port);
    ASSERT_GT(port, 0);
    LaunchEnvironment environment{.world_size = 2, .master_port = port, .store_is_external = true};
    const auto first = connect_store(environment, std::chrono::seconds(5));
    environment.rank = 1;
    const auto second = connect_store(environment, std::chrono::seconds(5));
    first->set("key", "value");
    EXPECT_EQ(second->get_to_str("key"), "value");
    environment.attempt = 1;  // a restarted job must not find what the one before it left
    const auto restarted = connect_store(environment, std::chrono::seconds(5));
    EXPECT_FALSE(restarted->check({"key"}));
}

TEST(Store, FailureNamesAddressAndPort) {
    int port = 0;
    (void)host_store(port);  // gone again: nobody listens there
    try {
        (void)connect_store({.rank = 1, .world_size = 2, .master_port = port},
                            std::chrono::milliseconds(1500));
        FAIL() << "connected to nobody";
    } catch (const CommError& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find("rank 1 cannot reach the store"), std::string::npos) << text;
        EXPECT_NE(text.find("127.0.0.1:" + std::to_string(port)), std::string::npos) << text;
        EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    }
}

TEST(Liveness, NamesTheRanksThatNeitherBeatNorEndedWell) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    Liveness observer(store, 0, 5);
    Liveness alive(store, 1, 5);
    auto finished = std::make_unique<Liveness>(store, 2, 5);
    auto vanished = std::make_unique<Liveness>(store, 3, 5);  // and rank 4 never came
    finished->finish();
    finished.reset();
    vanished.reset();
    EXPECT_EQ(observer.silent_ranks(kLivenessPatience), (std::vector<int>{3, 4}));
}

TEST(Liveness, DoesNotHangWhenTheStoreIsGone) {
    int port = 0;
    auto host = host_store(port);
    auto liveness = std::make_unique<Liveness>(host, 0, 2);
    host.reset();
    const auto start = std::chrono::steady_clock::now();
    EXPECT_TRUE(liveness->silent_ranks(std::chrono::milliseconds(100)).empty());
    liveness.reset();
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(8));
}

}  // namespace
}  // namespace hybridcp
