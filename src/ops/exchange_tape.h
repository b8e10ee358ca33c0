// What a checkpointed segment keeps of its first forward pass so that the second one, which only
// makes the activations again, does not communicate: what came from other ranks, and what is dear
// to compute. docs/activation-checkpointing.md lists the entries of every op.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace hybridcp {

class StateExchanger;  // ops/state_exchange.h

struct TapeEntry {
    std::string op;
    std::vector<at::Tensor> tensors;  // without history; may be undefined
    /// Of the gated delta rule: it has the M that backward needs.
    std::shared_ptr<StateExchanger> exchanger = nullptr;
};

/// Records in the order of the calls, and replays in that order.
class ExchangeTape {
  public:
    [[nodiscard]] bool replays() const { return replays_; }
    /// Errors: UsageError when the tape replays.
    void record(TapeEntry entry);
    /// The next entry, which leaves the tape. Errors: UsageError naming `op` when the next entry is
    /// another op's, or none is left, or the tape still records.
    [[nodiscard]] TapeEntry take(const std::string& op);

    void start_replay() { replays_ = true; }
    /// Errors: UsageError naming the first op whose entry was not taken.
    void check_taken() const;

  private:
    std::vector<TapeEntry> entries_;
    std::size_t next_ = 0;
    bool replays_ = false;
};

}  // namespace hybridcp
