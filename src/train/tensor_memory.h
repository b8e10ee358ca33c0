// Bytes of CPU tensors that the calling thread allocates: what a step or a layer holds, counted
// byte by byte where resident memory would also show caches and fragmentation.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

namespace hybridcp {

/// Counts while it exists, on this thread (on the CPU the backward pass runs there too). Tensors
/// from before may be freed meanwhile, so live bytes can fall below zero.
class TensorMemory {
  public:
    TensorMemory();
    ~TensorMemory();
    TensorMemory(const TensorMemory&) = delete;
    TensorMemory& operator=(const TensorMemory&) = delete;

    [[nodiscard]] std::int64_t live_bytes() const;
    [[nodiscard]] std::int64_t peak_bytes() const;

  private:
    class Reporter;
    std::shared_ptr<Reporter> reporter_;
    c10::DebugInfoGuard guard_;
};

}  // namespace hybridcp
