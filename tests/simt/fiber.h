#pragma once

// Stackful coroutines: each emulated CUDA thread has one. ucontext makes the stack; _setjmp and
// _longjmp switch, since swapcontext asks the kernel for the signal mask at each switch.

#include <csetjmp>
#include <cstddef>
#include <vector>

#include <ucontext.h>

namespace hybridcp::simt {

/// Stacks of one launch, each with a page below it that must not be touched.
class StackPool {
  public:
    explicit StackPool(std::size_t count);
    ~StackPool();
    StackPool(const StackPool&) = delete;
    StackPool& operator=(const StackPool&) = delete;

    static constexpr std::size_t kStackBytes = std::size_t{256} * 1024;
    [[nodiscard]] std::byte* stack(std::size_t index) const;
    [[nodiscard]] std::size_t count() const { return count_; }

  private:
    std::size_t count_;
    std::byte* memory_;
};

class Fiber {
  public:
    /// The fiber will call `entry` when first switched to; `entry` must never return.
    void prepare(std::byte* stack, void (*entry)());
    /// Leaves this fiber, which must be the running one, for `next`; returns when something
    /// switches back.
    void switch_to(Fiber& next);
    /// To be called first thing in `entry`.
    void entered();

  private:
    ucontext_t start_{};
    std::jmp_buf place_{};
    bool started_ = true;  // the scheduler's own fiber never starts
    const void* stack_ = nullptr;
    std::size_t stack_bytes_ = 0;
    void* fake_stack_ = nullptr;  // of the address sanitizer
};

}  // namespace hybridcp::simt
