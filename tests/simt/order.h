#pragma once

// Which accesses are ordered: vector clocks. The time of a thread grows when it hands over, and
// each thread knows up to which time it has seen each other one. An access at time t of thread a
// comes before what thread b does now if b knows a up to t; if neither comes before the other, they
// race, whatever the scheduler happened to do.

#include <cstdint>
#include <memory>
#include <vector>

namespace hybridcp::simt {

using Times = std::vector<uint32_t>;  // by thread of the cluster

struct Clock {
    [[nodiscard]] bool knows(uint32_t other, uint32_t other_time) const {
        return other == id || (others != nullptr && (*others)[other] >= other_time);
    }

    uint32_t id = 0;
    uint32_t time = 1;
    bool touched = false;  // something to hand over since the last time
    std::shared_ptr<const Times> others;
};

/// What goes from those who arrive at a barrier to those who leave it.
class Channel {
  public:
    explicit Channel(std::size_t threads = 0) : collected_(threads) {}
    void resize(std::size_t threads) { collected_.resize(threads); }

    /// The thread hands over what it did and knows.
    void release(Clock& clock);
    /// A copy hands over itself.
    void release(uint32_t id, uint32_t time);
    /// Those who acquire from here on get all that was released before.
    void publish() { published_ = std::make_shared<const Times>(collected_); }
    void acquire(Clock& clock);

  private:
    Times collected_;
    std::shared_ptr<const Times> published_;
    // Threads that arrive together mostly know the same.
    std::shared_ptr<const Times> last_released_;
    std::shared_ptr<const Times> last_known_, last_published_, last_result_;
};

}  // namespace hybridcp::simt
