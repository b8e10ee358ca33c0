// A heartbeat per rank in the job's store, so that a rank whose wait failed can say which rank is
// gone: Gloo reports the neighbour that broke the connection, which is often only the first one to
// notice.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace hybridcp {

/// Several beats, since a busy machine may delay one: how long Group watches for heartbeats after a
/// wait has failed.
inline constexpr std::chrono::milliseconds kLivenessPatience{3000};

class Liveness {
  public:
    /// Beats once a second from its own thread, over its own connection to the store.
    Liveness(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size);
    /// Never waits for a store that does not answer for more than a moment.
    ~Liveness();
    Liveness(const Liveness&) = delete;
    Liveness& operator=(const Liveness&) = delete;

    /// Called after a wait has failed: the ranks whose heartbeat does not move within `patience`,
    /// and that neither ended well nor noticed a failure themselves. Empty when the store itself
    /// does not answer.
    [[nodiscard]] std::vector<int> silent_ranks(std::chrono::milliseconds patience);
    /// Records that this rank has ended as it should, so that others do not call it silent.
    void finish();

  private:
    struct Shared;
    static void beat(const std::shared_ptr<Shared>& shared);
    [[nodiscard]] bool settle();
    [[nodiscard]] std::vector<std::int64_t> read_counters();

    int rank_;
    std::shared_ptr<Shared> shared_;  // with the thread, which outlives this when the store hangs
    std::thread thread_;
};

}  // namespace hybridcp
