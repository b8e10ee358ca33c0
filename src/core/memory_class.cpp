#include "core/memory_class.h"

#include <atomic>
#include <utility>

namespace hybridcp {

namespace {

struct Names {
    std::string_view name, key;
};

constexpr std::array<Names, kNumMemoryClasses> kNames{{
    {"parameters", "parameters"},
    {"gradients", "gradients"},
    {"optimizer", "optimizer"},
    {"residual stream", "stream"},
    {"linear attention", "linear_attention"},
    {"full attention", "full_attention"},
    {"feed-forward", "feed_forward"},
    {"embedding, head, other", "other"},
    {"exchange", "exchange"},
    {"logits and loss", "logits"},
}};

thread_local std::optional<MemoryClass> current_class;
std::atomic<void (*)()> scope_listener = nullptr;

void tell() {
    if (const auto listener = scope_listener.load(std::memory_order_acquire)) {
        listener();
    }
}

}  // namespace

std::string_view name_of(MemoryClass memory_class) {
    return kNames.at(index_of(memory_class)).name;
}

std::string_view key_of(MemoryClass memory_class) {
    return kNames.at(index_of(memory_class)).key;
}

MemoryScope::MemoryScope(MemoryClass memory_class)
    : outer_(std::exchange(current_class, memory_class)) {
    tell();
}

MemoryScope::~MemoryScope() {
    current_class = outer_;
    tell();
}

std::optional<MemoryClass> MemoryScope::current() {
    return current_class;
}

void MemoryScope::set_listener(void (*listener)()) {
    scope_listener.store(listener, std::memory_order_release);
}

}  // namespace hybridcp
