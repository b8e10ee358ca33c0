// Import by runs of elements: the right ones, and no more memory than they need.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <numeric>
#include <random>

#include "hybridcp/error.h"
#include "model/parameter_source.h"
#include "model/test_files.h"

namespace hybridcp {
namespace {

using testing::golden_model;
using testing::TemporaryFolder;

std::int64_t num_elements(const ParameterShape& parameter) {
    return std::accumulate(parameter.shape.begin(), parameter.shape.end(), std::int64_t{1},
                           std::multiplies<>());
}

class LoadRuns : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(
    Folders,
    LoadRuns,
    ::testing::Values("dense_tiny8", "dense_mini_bf16", "moe_vl_mini", "moe_vl_mini_per_expert"));

TEST_P(LoadRuns, AreRunsOfTheWhole) {
    const std::string folder = golden_model(GetParam());
    const ModelConfig config = read_model_config(folder);
    const auto source = stored_parameters(folder, config);
    std::mt19937_64 random{7};
    for (const ParameterShape& parameter : parameter_shapes(config)) {
        const at::Tensor whole = read_parameter(*source, parameter, at::kCPU).view({-1});
        for (int round = 0; round < 8; ++round) {
            const auto count = static_cast<std::uint64_t>(num_elements(parameter));
            const auto begin = static_cast<std::int64_t>(random() % count);
            const auto rest = count - static_cast<std::uint64_t>(begin);
            const auto size = static_cast<std::int64_t>(random() % (rest + 1));
            const at::Tensor run = at::full({size}, -7.0F);
            source->read(parameter, begin, run);
            EXPECT_TRUE(at::equal(run, whole.narrow(0, begin, size)))
                << parameter.name << " from " << begin << ", " << size;
        }
    }
}

/// A line of /proc/self/status, in bytes.
std::int64_t memory_bytes(const std::string& key) {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with(key + ":")) {
            return std::stoll(line.substr(key.size() + 1)) * 1024;
        }
    }
    return 0;
}

void run_in_child(const std::function<void()>& work) {
    const pid_t child = ::fork();
    if (child == 0) {
        work();
        ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
}

// One rank of two reads its half; the whole would be twice that, a second copy of it as well.
TEST(LoadMemory, OfAShardIsTheShard) {
    ModelConfig config = preset_model_config("tiny");
    config.vocab_size = 120'000;
    const TemporaryFolder folder;
    // In processes of their own: memory that one frees must not serve the other.
    run_in_child([&] {
        save_parameters(*random_parameters(config, 1), config, folder.path(), at::kBFloat16);
    });
    run_in_child([&] {
        const auto source = stored_parameters(folder.path(), config);
        source->read(parameter_shapes(config).back(), 0, at::empty({1}));  // what is loaded once
        std::ofstream("/proc/self/clear_refs") << "5";                     // the peak starts anew
        const std::int64_t before = memory_bytes("VmRSS");
        std::vector<at::Tensor> shard;
        std::int64_t shard_bytes = 0;
        for (const ParameterShape& parameter : parameter_shapes(config)) {
            const std::int64_t half = num_elements(parameter) / 2;
            shard.push_back(at::empty({half}));
            source->read(parameter, half, shard.back());
            shard_bytes += half * 4;
        }
        const std::int64_t peak = memory_bytes("VmHWM") - before;
        const double factor = static_cast<double>(peak) / static_cast<double>(shard_bytes);
        std::ofstream(folder.file("factor")) << factor << " " << shard_bytes;
    });
    double factor = 0;
    std::int64_t shard_bytes = 0;
    std::ifstream(folder.file("factor")) >> factor >> shard_bytes;
    EXPECT_GT(shard_bytes, 30'000'000);
    EXPECT_LE(factor, 1.2);
    EXPECT_GE(factor, 0.95) << "the measure does not see the shard";
    RecordProperty("peak_per_shard", std::to_string(factor));
    std::cout << "peak host memory: " << factor << " of the shard's " << shard_bytes << " bytes\n";
}

}  // namespace
}  // namespace hybridcp
