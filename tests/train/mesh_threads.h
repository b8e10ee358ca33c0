// Runs a test on the ranks of a (dp, cp) mesh, each a thread of this process; see rank_threads.h.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "rank_threads.h"
#include "train/mesh.h"

namespace hybridcp::testing {

inline void run_mesh(int dp,
                     int cp,
                     const std::function<void(const Mesh&)>& body,
                     int shard_size = 1) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const int num_ranks = dp * cp;
    RankFailures failures;
    std::vector<Mesh> meshes(static_cast<std::size_t>(num_ranks));  // kept until all ranks are done
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) {
        threads.emplace_back([&, rank] {
            const ::testing::ScopedTrace trace(__FILE__, __LINE__, "rank " + std::to_string(rank));
            at::set_num_threads(1);
            Mesh& mesh = meshes[static_cast<std::size_t>(rank)];
            try {
                mesh = make_mesh(store, {.rank = rank,
                                         .world_size = num_ranks,
                                         .dp = dp,
                                         .cp = cp,
                                         .shard_size = shard_size,
                                         .timeout = std::chrono::seconds(60)});
                body(mesh);
            } catch (...) {
                failures.add(std::current_exception());
                mesh = Mesh{};
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    failures.rethrow();
}

/// A folder that is gone at the end of the test.
class TemporaryFolder {
  public:
    TemporaryFolder()
        : path_(std::filesystem::temp_directory_path() /
                ("hcp_train_" + std::to_string(::getpid()) + "_" +
                 ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
        std::filesystem::remove_all(path_);
        std::filesystem::create_directories(path_);
    }
    ~TemporaryFolder() { std::filesystem::remove_all(path_); }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;

    [[nodiscard]] std::string operator/(const std::string& name) const { return path_ / name; }
    /// Writes a file and returns its path.
    std::string write(const std::string& name, const std::string& content) const {
        std::ofstream(path_ / name, std::ios::binary) << content;
        return path_ / name;
    }

  private:
    std::filesystem::path path_;
};

/// The message of what `action` throws; "nothing" when it does not.
template <typename Action>
std::string message_of(const Action& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return "nothing";
}

}  // namespace hybridcp::testing
