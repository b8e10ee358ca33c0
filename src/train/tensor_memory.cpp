#include "train/tensor_memory.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <vector>

namespace hybridcp {

namespace {

/// In whose scope the nodes of the autograd graph were made, by their sequence numbers: a thread
/// numbers its nodes upwards.
class NodeClasses {
  public:
    /// Nodes that this thread makes from now on.
    void begin(MemoryClass memory_class) {
        std::vector<Start>& starts = by_thread_[at::RecordFunction::currentThreadId()];
        const std::uint64_t next = at::sequence_number::peek();
        if (!starts.empty() && starts.back().first == next) {
            starts.back().memory_class = memory_class;
        } else {
            starts.push_back({.first = next, .memory_class = memory_class});
        }
    }

    [[nodiscard]] MemoryClass of(const torch::autograd::Node& node) const {
        const auto found = by_thread_.find(node.thread_id());
        if (found == by_thread_.end()) {
            return MemoryClass::kOther;
        }
        const std::vector<Start>& starts = found->second;
        const auto after = std::upper_bound(
            starts.begin(), starts.end(), node.sequence_nr(),
            [](std::uint64_t number, const Start& start) { return number < start.first; });
        return after == starts.begin() ? MemoryClass::kOther : std::prev(after)->memory_class;
    }

  private:
    struct Start {
        std::uint64_t first = 0;
        MemoryClass memory_class = MemoryClass::kOther;
    };
    std::map<std::uint64_t, std::vector<Start>> by_thread_;
};

}  // namespace

class TensorMemory::Reporter : public c10::MemoryReportingInfoBase {
  public:
    void reportMemoryUsage(void* address,
                           std::int64_t size_bytes,  // negative when freed
                           std::size_t /*total_allocated*/,
                           std::size_t /*total_reserved*/,
                           c10::Device /*device*/) override {
        const std::lock_guard lock(mutex_);
        if (size_bytes < 0) {
            if (!forget(address)) {  // from before this recorder
                live_bytes_.at(index_of(MemoryClass::kOther)) += size_bytes;
                total_bytes_ += size_bytes;
            }
            return;
        }
        (void)forget(address);  // freed meanwhile by a thread that does not report here
        const Block block{.size_bytes = size_bytes, .memory_class = current_class()};
        blocks_.emplace(address, block);
        const std::size_t index = index_of(block.memory_class);
        live_bytes_.at(index) += size_bytes;
        total_bytes_ += size_bytes;
        std::int64_t& class_peak = record_.class_peak_bytes.at(index);
        class_peak = std::max(class_peak, live_bytes_.at(index));
        if (total_bytes_ > record_.peak_bytes) {
            record_.peak_bytes = total_bytes_;
            record_.at_peak_bytes = live_bytes_;
        }
    }
    [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }

    void scope_changes() {
        const std::lock_guard lock(mutex_);
        last_of_backward_ = MemoryClass::kOther;
        nodes_.begin(MemoryScope::current().value_or(MemoryClass::kOther));
    }

    [[nodiscard]] BytesByClass live_bytes() const {
        const std::lock_guard lock(mutex_);
        return live_bytes_;
    }
    [[nodiscard]] MemoryRecord record() const {
        const std::lock_guard lock(mutex_);
        return record_;
    }
    void reset_peaks() {
        const std::lock_guard lock(mutex_);
        record_ = {.peak_bytes = total_bytes_,
                   .at_peak_bytes = live_bytes_,
                   .class_peak_bytes = live_bytes_};
    }

  private:
    struct Block {
        std::int64_t size_bytes = 0;
        MemoryClass memory_class = MemoryClass::kOther;
    };

    /// False when no such block is known.
    [[nodiscard]] bool forget(void* address) {
        const auto found = blocks_.find(address);
        if (found == blocks_.end()) {
            return false;
        }
        live_bytes_.at(index_of(found->second.memory_class)) -= found->second.size_bytes;
        total_bytes_ -= found->second.size_bytes;
        blocks_.erase(found);
        return true;
    }

    [[nodiscard]] MemoryClass current_class() {
        if (const auto scope = MemoryScope::current()) {
            return *scope;
        }
        const auto node = torch::autograd::get_current_node();
        if (node != nullptr) {
            // A node that only adds to a leaf's .grad has the largest number of all.
            last_of_backward_ =
                node->sequence_nr() == UINT64_MAX ? MemoryClass::kGradients : nodes_.of(*node);
        }
        return last_of_backward_;  // between nodes: sums of what several of them have returned
    }

    mutable std::mutex mutex_;
    std::unordered_map<void*, Block> blocks_;
    NodeClasses nodes_;
    MemoryClass last_of_backward_ = MemoryClass::kOther;
    BytesByClass live_bytes_{};
    std::int64_t total_bytes_ = 0;
    MemoryRecord record_;
};

TensorMemory::TensorMemory()
    : reporter_(std::make_shared<Reporter>()),
      guard_(c10::DebugInfoKind::PROFILER_STATE, reporter_) {
    MemoryScope::set_listener([] {
        auto* info = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
        if (auto* reporter = dynamic_cast<Reporter*>(info)) {
            reporter->scope_changes();
        }
    });
}

TensorMemory::~TensorMemory() = default;

std::int64_t TensorMemory::live_bytes() const {
    const BytesByClass bytes = reporter_->live_bytes();
    return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
}

std::int64_t TensorMemory::live_bytes(MemoryClass memory_class) const {
    return reporter_->live_bytes().at(index_of(memory_class));
}

std::int64_t TensorMemory::peak_bytes() const {
    return reporter_->record().peak_bytes;
}

MemoryRecord TensorMemory::record() const {
    return reporter_->record();
}

void TensorMemory::reset_peaks() {
    reporter_->reset_peaks();
}

}  // namespace hybridcp
