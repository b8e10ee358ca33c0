#include "train/tensor_memory.h"

#include <c10/core/Allocator.h>

#include <algorithm>

namespace hybridcp {

class TensorMemory::Reporter : public c10::MemoryReportingInfoBase {
  public:
    void reportMemoryUsage(void* /*address*/,
                           std::int64_t size,  // negative when freed
                           std::size_t /*total_allocated*/,
                           std::size_t /*total_reserved*/,
                           c10::Device /*device*/) override {
        live_ += size;
        peak_ = std::max(peak_, live_);
    }
    [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }
    [[nodiscard]] std::int64_t live() const { return live_; }
    [[nodiscard]] std::int64_t peak() const { return peak_; }

  private:
    std::int64_t live_ = 0;
    std::int64_t peak_ = 0;
};

TensorMemory::TensorMemory()
    : reporter_(std::make_shared<Reporter>()),
      guard_(c10::DebugInfoKind::PROFILER_STATE, reporter_) {}

TensorMemory::~TensorMemory() = default;

std::int64_t TensorMemory::live_bytes() const {
    return reporter_->live();
}

std::int64_t TensorMemory::peak_bytes() const {
    return reporter_->peak();
}

}  // namespace hybridcp
