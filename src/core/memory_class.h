// What memory is for: the classes in which a recorder (train/tensor_memory.h) counts tensors and a
// plan (plan/memory_plan.h) foresees them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace hybridcp {

enum class MemoryClass : std::uint8_t {
    kParameters,       // fp32 values, and the units that sharding gathers
    kGradients,        // and the buffers of their reduction
    kOptimizer,        // moments
    kStream,           // the residual stream between layers and their halves
    kLinearAttention,  // activations of the layer kinds
    kFullAttention,
    kFeedForward,
    kOther,     // embedding, rotary tables, final norm; what no scope names
    kExchange,  // what is sent to other ranks, what came from them
    kLogits,    // and what the loss keeps for its backward pass
};
inline constexpr std::size_t kNumMemoryClasses = 10;

/// A number of bytes for each class.
using BytesByClass = std::array<std::int64_t, kNumMemoryClasses>;

[[nodiscard]] constexpr std::size_t index_of(MemoryClass memory_class) {
    return static_cast<std::size_t>(memory_class);
}
/// As tables write it: "linear attention".
[[nodiscard]] std::string_view name_of(MemoryClass memory_class);
/// As JSON keys write it: "linear_attention".
[[nodiscard]] std::string_view key_of(MemoryClass memory_class);

/// While it exists, what this thread allocates is of this class; the innermost scope counts. Costs
/// next to nothing where nobody records.
class MemoryScope {
  public:
    explicit MemoryScope(MemoryClass memory_class);
    ~MemoryScope();
    MemoryScope(const MemoryScope&) = delete;
    MemoryScope& operator=(const MemoryScope&) = delete;

    /// Of this thread; nothing outside scopes.
    [[nodiscard]] static std::optional<MemoryClass> current();
    /// Called on the thread whose scope changes, on every change; set once, by the recorder.
    static void set_listener(void (*listener)());

  private:
    std::optional<MemoryClass> outer_;
};

}  // namespace hybridcp
