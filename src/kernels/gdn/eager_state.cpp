// The serial part: the recurrence of the state over chunks, and its adjoint.
#include <ATen/ATen.h>

#include "kernels/gdn/eager.h"

namespace hybridcp::gdn {
namespace {

using at::Tensor;

/// Where a pass holds the states of its steps: all of them, or two by turns.
struct StateBuffer {
    StateBuffer(const ChunkLayout& layout, const Tensor& first, KeepStates keep)
        : keeps_all(keep == KeepStates::kYes),
          slot_size(layout.num_segments()),
          heads(layout.num_segments() == 0 ? 0 : first.size(0) / layout.num_segments()) {
        // One slot to spare: see run_forward.
        const std::int64_t slots = keeps_all ? layout.num_chunks() + slot_size : 2 * slot_size;
        states = at::empty({slots * heads, first.size(1), first.size(2)}, first.options());
    }

    /// States of the first `count` segments at the step that starts with `first_chunk`.
    [[nodiscard]] Tensor at_step(std::size_t step,
                                 std::int64_t first_chunk,
                                 std::int64_t count) const {
        const std::int64_t row =
            keeps_all ? first_chunk : static_cast<std::int64_t>(step % 2) * slot_size;
        return states.narrow(0, row * heads, count * heads);
    }

    /// One state per chunk, when all are kept.
    [[nodiscard]] Tensor of_chunks(const ChunkLayout& layout) const {
        return keeps_all ? states.narrow(0, 0, layout.num_chunks() * heads) : Tensor();
    }

    bool keeps_all;
    std::int64_t slot_size;
    std::int64_t heads;
    Tensor states;
};

/// Segments [begin, end) of a tensor with one matrix per segment and head.
Tensor segments(const Tensor& x, std::int64_t begin, std::int64_t end, std::int64_t heads) {
    return x.narrow(0, begin * heads, (end - begin) * heads);
}

}  // namespace

StatePass run_forward(const ChunkFactors& factors,
                      const ChunkLayout& layout,
                      const Tensor& first,
                      const Tensor& values,
                      KeepStates keep) {
    const StateBuffer buffer(layout, first, keep);
    const std::int64_t heads = buffer.heads;
    const auto& steps = layout.steps();
    auto new_values = layout.split_steps(values);
    const auto k_erase = layout.split_steps(factors.k_erase);
    const auto k_write = layout.split_steps(factors.k_write.mT());
    const auto chunk_decay = layout.split_steps(factors.chunk_decay);
    Tensor last = first.clone();  // right for empty segments
    for (std::size_t s = 0; s < steps.size(); ++s) {
        const auto [chunk, count, running] = steps[s];
        Tensor state = buffer.at_step(s, chunk, count);
        if (s == 0) {
            state.copy_(segments(first, 0, count, heads));
        }
        new_values[s].baddbmm_(k_erase[s], state, 1, -1);
        // States of segments that end here go past those of the next step, over states that are not
        // yet written, and are moved out at once.
        Tensor next = buffer.at_step(s + 1, chunk + count, count);
        at::mul_out(next, state, chunk_decay[s]);
        next.baddbmm_(k_write[s], new_values[s]);
        if (running < count) {
            segments(last, running, count, heads).copy_(segments(next, running, count, heads));
        }
    }
    return {.states = buffer.of_chunks(layout), .values = values, .last = last};
}

StatePass run_reverse(const ChunkFactors& factors,
                      const ChunkLayout& layout,
                      const Tensor& first,
                      const OutputGradient& gradient,
                      KeepStates keep) {
    const StateBuffer buffer(layout, first, keep);
    const std::int64_t heads = buffer.heads;
    const auto& steps = layout.steps();
    auto d_values = layout.split_steps(gradient.values);
    const auto d_o = layout.split_steps(gradient.d_o);
    const auto q_read = layout.split_steps(factors.q_read.mT());
    const auto k_erase = layout.split_steps(factors.k_erase.mT());
    const auto k_write = layout.split_steps(factors.k_write);
    const auto chunk_decay = layout.split_steps(factors.chunk_decay);
    Tensor last = first.clone();
    for (std::size_t s = steps.size(); s-- > 0;) {
        const auto [chunk, count, running] = steps[s];
        const Tensor d_state = buffer.at_step(s, chunk, count);
        if (running < count) {  // segments that end here
            segments(d_state, running, count, heads).copy_(segments(first, running, count, heads));
        }
        d_values[s].baddbmm_(k_write[s], d_state);
        Tensor previous = s == 0 ? segments(last, 0, count, heads)
                                 : buffer.at_step(s - 1, steps[s - 1].first_chunk, count);
        at::mul_out(previous, d_state, chunk_decay[s]);
        previous.baddbmm_(q_read[s], d_o[s]);
        previous.baddbmm_(k_erase[s], d_values[s], 1, -1);
    }
    return {.states = buffer.of_chunks(layout), .values = gradient.values, .last = last};
}

}  // namespace hybridcp::gdn
