// The two halves of a decoder layer as they take memory: the order of allocations and frees is that
// of src/model, src/ops and src/kernels, with a number of bytes for each tensor. Legend: T local
// tokens, d hidden, e bytes of an element in the compute dtype.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "plan/memory_plan.h"

namespace hybridcp::plan {

using Held = MemoryLedger::Held;

inline constexpr std::int64_t kWide = 4;  // bytes of fp32

/// What all parts of a step share.
struct Book {
    MemoryLedger& ledger;
    const MemoryPlanInput& in;
    std::vector<Held> gradients = {};  // of the unit whose backward pass runs, or of all
    bool gradients_exist = false;      // from an earlier micro-batch: later ones are added to them

    /// Of the rank with the most, in the stream.
    [[nodiscard]] std::int64_t tokens() const {
        return (in.rows * in.row_tokens + in.cp - 1) / in.cp;
    }
    [[nodiscard]] std::int64_t all_tokens() const { return in.rows * in.row_tokens; }
    [[nodiscard]] bool is_narrow() const { return in.element_bytes < kWide; }

    [[nodiscard]] Held take(MemoryClass memory_class, std::int64_t bytes) const {
        return ledger.take(memory_class, bytes);
    }
    /// For a moment.
    void touch(MemoryClass memory_class, std::int64_t bytes) const {
        (void)ledger.take(memory_class, bytes);
    }
    /// The copy of a weight in the compute dtype, beside an fp32 weight.
    [[nodiscard]] Held cast_weight(MemoryClass memory_class, std::int64_t numel) const;
    void add_gradient(std::int64_t numel);

    /// y = x W^T with x [tokens, in].
    [[nodiscard]] Held project(MemoryClass memory_class,
                               std::int64_t tokens,
                               std::int64_t numel_in,
                               std::int64_t numel_out) const;
    /// The gradient of W; products of bf16 into fp32 widen both factors on the CPU.
    void weight_gradient(MemoryClass memory_class,
                         std::int64_t tokens,
                         std::int64_t numel_in,
                         std::int64_t numel_out);
    /// Both gradients of project: that of x is returned.
    [[nodiscard]] Held project_backward(MemoryClass memory_class,
                                        std::int64_t tokens,
                                        std::int64_t numel_in,
                                        std::int64_t numel_out);
    /// The norm at a half's start: x in the compute dtype. Keeps 4 bytes a token besides.
    [[nodiscard]] Held norm(MemoryClass memory_class) const;
    /// From the gradient of the norm's output to that of the stream, `residual` added: in place,
    /// unless somebody else holds that.
    [[nodiscard]] Held norm_backward(MemoryClass memory_class,
                                     Held d_x,
                                     const Held& residual) const;
    /// The stream after a half has added to it.
    [[nodiscard]] Held add_to_stream() const;
    /// The gradient of the stream in the compute dtype.
    [[nodiscard]] Held narrow_gradient(MemoryClass memory_class, const Held& d_out) const;
};

/// One half: what it keeps between its passes is in it.
class Half {
  public:
    virtual ~Half() = default;
    /// Returns the stream behind the half. In a second pass what the first recorded is used.
    [[nodiscard]] virtual Held forward(const Held& stream) = 0;
    /// Frees what forward keeps, but for what came from other ranks and is dear (the tape).
    virtual void forget() = 0;
    /// From the gradient behind the half to that before it.
    [[nodiscard]] virtual Held backward(Held d_out) = 0;
};

[[nodiscard]] std::unique_ptr<Half> make_mixer_half(Book& book, Mixer mixer);
[[nodiscard]] std::unique_ptr<Half> make_feed_forward_half(Book& book);

}  // namespace hybridcp::plan
