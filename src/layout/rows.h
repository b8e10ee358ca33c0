// Rows (tokens) that move between ranks: the words shared by the halo exchange and by routes.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace hybridcp {

/// `count` rows that stand one after another on both sides.
struct RowRun {
    std::int64_t source = 0;  // first local row on the sender
    std::int64_t target = 0;  // first row in the receiver's tensor
    std::int64_t count = 0;
    bool operator==(const RowRun&) const = default;
};

/// All rows that one rank sends to another, in the order in which they stand in the message; both
/// ends list them alike.
struct RowMessage {
    int peer = 0;
    std::vector<RowRun> runs;
    std::int64_t num_rows = 0;
};

/// Adds a run; one that goes on where the last ended on both sides makes it longer.
void append_run(std::vector<RowRun>& runs, const RowRun& run);

/// Collects runs by peer.
class RowMessages {
  public:
    void append(int peer, const RowRun& run);
    /// At most one message per peer, by ascending peer.
    [[nodiscard]] std::vector<RowMessage> take();

  private:
    std::map<int, RowMessage> by_peer_;
};

}  // namespace hybridcp
