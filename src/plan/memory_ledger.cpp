#include "plan/memory_ledger.h"

#include <algorithm>

namespace hybridcp::plan {

MemoryLedger::Held MemoryLedger::take(MemoryClass memory_class, std::int64_t bytes) {
    add(memory_class, bytes);
    return {this, [memory_class, bytes](const void* ledger) {
                // The pointer was made from a ledger that is not const.
                auto* self = static_cast<MemoryLedger*>(const_cast<void*>(ledger));
                self->add(memory_class, -bytes);
            }};
}

void MemoryLedger::add(MemoryClass memory_class, std::int64_t bytes) {
    std::int64_t& live = live_bytes_.at(index_of(memory_class));
    live += bytes;
    total_bytes_ += bytes;
    std::int64_t& class_peak = peak_.class_peak_bytes.at(index_of(memory_class));
    class_peak = std::max(class_peak, live);
    if (total_bytes_ > peak_.total_bytes) {
        peak_.total_bytes = total_bytes_;
        peak_.at_peak_bytes = live_bytes_;
        peak_.moment = moment_;
    }
}

}  // namespace hybridcp::plan
