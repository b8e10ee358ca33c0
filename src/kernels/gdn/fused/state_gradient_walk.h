// The walk against time that carries the gradient of the state alone: gradient summaries, and its
// values at checkpoints.
#pragma once

#include "kernels/gdn/fused/backward_step.h"
#include "kernels/gdn/fused/walk.h"

namespace hybridcp::HCP_ISA {

/// Only the state's gradient.
template <typename Engine, typename Input>
struct StateGradientWalk : Walk<Engine, Input> {
    BackwardScratch<Engine> gradient_scratch;
    State<Engine> gradients[kMostValueHeads];
    Input* d_o_copy;  // [C, V]

    StateGradientWalk(const GdnProblemView& the_problem, const GdnTask& the_task, Workspace& space)
        : Walk<Engine, Input>(the_problem, the_task, space), gradient_scratch(space, this->sizes) {
        this->keys.ahead.spare_short_blocks();
        d_o_copy = space.take<Input>(this->sizes.tokens * this->sizes.value_row);
        for (std::int64_t i = 0; i < the_problem.group; ++i) {
            gradients[i] = State<Engine>(space, this->sizes);
        }
    }

    void run(const GdnStateGradientTask& request) {
        const auto count = [&](std::int64_t i) {
            return request.chunk_counts == nullptr ? this->chunks.size() : request.chunk_counts[i];
        };
        std::int64_t last = 0;
        for (std::int64_t i = 0; i < this->problem.group; ++i) {
            this->load_state(gradients[i], this->state_of(request.d_end, i));
            last = count(i) > last ? count(i) : last;
        }
        for (std::int64_t c = last - 1; c >= 0; --c) {
            this->keys.ahead.finish();
            this->look_ahead_at_keys(this->problem.k, c - 1);
            this->look_ahead_at_keys(this->problem.q, c - 1);
            this->look_ahead_at_key_record(c - 1);
            this->template look_ahead_at_values<Input>(request.d_o, c - 1);
            this->fill_keys(c, KeyChunk<Engine>::Use::kGradients);
            for (std::int64_t i = 0; i < this->problem.group; ++i) {
                if (c < count(i)) {
                    step(request, c, i);
                }
            }
        }
        for (std::int64_t i = 0; i < this->problem.group; ++i) {
            this->store_state(gradients[i], this->state_of(this->task.end, i));
        }
    }

    /// Rows of dO, or zeros.
    [[nodiscard]] TokenRows<Input> output_gradient_rows(const GdnView& d_o,
                                                        std::int64_t c,
                                                        std::int64_t i) const {
        if (d_o.data != nullptr) {
            return this->value_rows(d_o, c, i, d_o_copy);
        }
        return whole_rows<Input>({nullptr, 0}, 0, 0, d_o_copy, this->keys.rows, this->sizes.values);
    }

  private:
    void step(const GdnStateGradientTask& request, std::int64_t c, std::int64_t i) {
        this->fill_head(c, i);
        pack_output_gradient(this->problem, this->sizes, this->keys, this->head,
                             output_gradient_rows(request.d_o, c, i), gradient_scratch);
        if (!gradients[i].zero) {
            read_gradient(this->sizes, this->keys, this->head, gradients[i].operand(this->sizes),
                          gradient_scratch);
        }
        solved_gradient(
            this->sizes, this->keys, this->head, gradients[i], [](int, int, Vec) {},
            gradient_scratch);
        update_gradient<false>(this->sizes, this->keys, this->head, gradients[i], gradient_scratch);
        if (request.checkpoints != nullptr && c > 0 && c % kCheckpointChunks == 0) {
            float* to =
                request.checkpoints + (c / kCheckpointChunks - 1) * request.checkpoint_stride;
            this->store_state(gradients[i], this->state_of(to, i));
        }
    }
};

}  // namespace hybridcp::HCP_ISA
