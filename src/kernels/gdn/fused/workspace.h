// Scratch memory of a task: a block handed out in pieces of whole cache lines. Run once with no
// block, it tells how many bytes a task needs.
#pragma once

#include <cstdint>

namespace hybridcp::HCP_ISA {

class Workspace {
  public:
    explicit Workspace(void* block) : base_(static_cast<char*>(block)) {}

    template <typename T>
    T* take(std::int64_t count) {
        // An odd number of lines: pieces of a power of two would all start in the same sets.
        const std::int64_t lines = ((count * static_cast<std::int64_t>(sizeof(T)) + 63) / 64) | 1;
        T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_bytes_);
        used_bytes_ += lines * 64;
        return piece;
    }

    [[nodiscard]] std::int64_t used_bytes() const { return used_bytes_; }

  private:
    char* base_;
    std::int64_t used_bytes_ = 0;
};

}  // namespace hybridcp::HCP_ISA
