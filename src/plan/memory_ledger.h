// A book of memory: what is taken, held and given back, by class, and the moment of the peak. A
// plan writes in it what a step would do with tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/memory_class.h"

namespace hybridcp::plan {

/// The peak, as train/tensor_memory.h measures it.
struct PeakMemory {
    std::int64_t total_bytes = 0;
    BytesByClass at_peak_bytes{};     // of each class, when the total is largest
    BytesByClass class_peak_bytes{};  // of each, whenever it is
    std::string moment;               // what the step does at the peak
};

class MemoryLedger {
  public:
    /// Memory that is given back when its last holder is gone; the ledger must outlive it.
    using Held = std::shared_ptr<const void>;

    [[nodiscard]] Held take(MemoryClass memory_class, std::int64_t bytes);
    /// What the step does from here on.
    void begin(std::string moment) { moment_ = std::move(moment); }
    [[nodiscard]] const PeakMemory& peak() const { return peak_; }
    [[nodiscard]] std::int64_t live_bytes(MemoryClass memory_class) const {
        return live_bytes_.at(index_of(memory_class));
    }

  private:
    void add(MemoryClass memory_class, std::int64_t bytes);

    BytesByClass live_bytes_{};
    std::int64_t total_bytes_ = 0;
    std::string moment_;
    PeakMemory peak_;
};

}  // namespace hybridcp::plan
