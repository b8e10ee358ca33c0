#include "simt/fiber.h"

#include <new>
#include <stdexcept>

#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace hybridcp::simt {
namespace {

constexpr std::size_t kGuardBytes = 4096;
constexpr std::size_t kPitch = StackPool::kStackBytes + kGuardBytes;

#if defined(__SANITIZE_ADDRESS__)
// Bounds of the scheduler's stack, learnt when the first fiber is entered.
const void* scheduler_stack = nullptr;
std::size_t scheduler_stack_bytes = 0;
#endif

}  // namespace

StackPool::StackPool(std::size_t count) : count_(count) {
    void* memory = mmap(nullptr, count * kPitch, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        throw std::bad_alloc();
    }
    memory_ = static_cast<std::byte*>(memory);
    for (std::size_t i = 0; i < count; ++i) {
        if (mprotect(memory_ + i * kPitch, kGuardBytes, PROT_NONE) != 0) {
            throw std::runtime_error("simt: cannot protect the end of a stack");
        }
    }
}

StackPool::~StackPool() {
    munmap(memory_, count_ * kPitch);
}

std::byte* StackPool::stack(std::size_t index) const {
    return memory_ + index * kPitch + kGuardBytes;
}

void Fiber::prepare(std::byte* stack, void (*entry)()) {
    getcontext(&start_);
    start_.uc_stack.ss_sp = stack;
    start_.uc_stack.ss_size = StackPool::kStackBytes;
    start_.uc_link = nullptr;
    makecontext(&start_, entry, 0);
    started_ = false;
    stack_ = stack;
    stack_bytes_ = StackPool::kStackBytes;
}

__attribute__((noinline)) void Fiber::switch_to(Fiber& next) {
#if defined(__SANITIZE_ADDRESS__)
    const bool to_scheduler = next.stack_ == nullptr;
    __sanitizer_start_switch_fiber(&fake_stack_, to_scheduler ? scheduler_stack : next.stack_,
                                   to_scheduler ? scheduler_stack_bytes : next.stack_bytes_);
#endif
    if (_setjmp(place_) == 0) {
        if (next.started_) {
            _longjmp(next.place_, 1);
        }
        next.started_ = true;
        setcontext(&next.start_);
    }
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::entered() {
#if defined(__SANITIZE_ADDRESS__)
    const void* from = nullptr;
    std::size_t bytes = 0;
    __sanitizer_finish_switch_fiber(nullptr, &from, &bytes);
    if (scheduler_stack == nullptr) {
        scheduler_stack = from;
        scheduler_stack_bytes = bytes;
    }
#endif
}

}  // namespace hybridcp::simt
