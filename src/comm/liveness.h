// A heartbeat per rank in the job's store, so that a rank whose wait failed can say which rank is gone: Gloo
// reports the neighbour that broke the connection, which is often only the first one to notice.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace hybridcp {

class Liveness {
  public:
    /// Beats once a second from its own thread, over its own connection to the store.
    Liveness(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size);
    ~Liveness();
    Liveness(const Liveness&) = delete;
    Liveness& operator=(const Liveness&) = delete;

    /// The ranks whose heartbeat does not move within `patience`, and that did not end well. Empty when the store
    /// itself does not answer.
    [[nodiscard]] std::vector<int> silent_ranks(std::chrono::milliseconds patience);
    /// Records that this rank has ended as it should, so that others do not call it silent.
    void finish();

  private:
    void beat();

    c10::intrusive_ptr<c10d::Store> store_;
    int rank_;
    int world_size_;
    bool stop_ = false;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::thread thread_;
};

}  // namespace hybridcp
