// Bytes of tensors that the calling thread allocates, by what they are for: counted byte by byte
// where resident memory would also show caches and fragmentation. docs/memory.md.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

#include "core/memory_class.h"

namespace hybridcp {

/// What a recorder has seen.
struct MemoryRecord {
    std::int64_t peak_bytes = 0;      // of all classes together
    BytesByClass at_peak_bytes{};     // of each, when that was reached
    BytesByClass class_peak_bytes{};  // of each, whenever it was
};

/// Counts while it exists, what this thread and, on CUDA, the threads of its backward passes
/// allocate and free. An allocation is of the innermost MemoryScope's class; in a backward pass
/// outside scopes, of the class in whose scope the node was made. Tensors from before may be freed
/// meanwhile, so live bytes can fall below zero; what a thread without this recorder frees is not
/// seen (Group sees to its own).
class TensorMemory {
  public:
    TensorMemory();
    ~TensorMemory();
    TensorMemory(const TensorMemory&) = delete;
    TensorMemory& operator=(const TensorMemory&) = delete;

    [[nodiscard]] std::int64_t live_bytes() const;
    [[nodiscard]] std::int64_t live_bytes(MemoryClass memory_class) const;
    [[nodiscard]] std::int64_t peak_bytes() const;
    [[nodiscard]] MemoryRecord record() const;
    /// Peaks are from now on.
    void reset_peaks();

  private:
    class Reporter;
    std::shared_ptr<Reporter> reporter_;
    c10::DebugInfoGuard guard_;
};

}  // namespace hybridcp
