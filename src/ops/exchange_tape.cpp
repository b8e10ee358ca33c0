#include "ops/exchange_tape.h"

#include <utility>

#include "hybridcp/error.h"

namespace hybridcp {

void ExchangeTape::record(TapeEntry entry) {
    HCP_CHECK(!replays_, "{}: a recomputed segment cannot record on its tape", entry.op);
    for (at::Tensor& tensor : entry.tensors) {
        if (tensor.defined()) {
            tensor = tensor.detach();
        }
    }
    entries_.push_back(std::move(entry));
}

TapeEntry ExchangeTape::take(const std::string& op) {
    HCP_CHECK(replays_, "{}: the segment's first forward pass has nothing to take from its tape",
              op);
    HCP_CHECK(next_ < entries_.size(),
              "{}: the recomputed segment takes more than its first forward pass recorded ({} "
              "entries)",
              op, entries_.size());
    HCP_CHECK(entries_[next_].op == op,
              "{}: the recomputed segment runs other ops than its first forward pass, which "
              "recorded {} here",
              op, entries_[next_].op);
    return std::exchange(entries_[next_++], TapeEntry{});
}

void ExchangeTape::check_taken() const {
    HCP_CHECK(next_ == entries_.size(), "{}: the recomputed segment left out this op",
              entries_[next_].op);
}

}  // namespace hybridcp
