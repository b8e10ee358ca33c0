// States that forward did not keep: made again from its checkpoints and new values, a few chunks at
// a time.
#pragma once

#include "kernels/gdn/fused/state_gradient_walk.h"

namespace hybridcp::HCP_ISA {

template <typename Engine, typename Input>
struct RemadeStates : StateGradientWalk<Engine, Input> {
    State<Engine> states[kMostValueHeads];
    float* new_values_copy;  // [C, V]
    ChunkRecord<Engine> records[kMostValueHeads][kCheckpointChunks<Engine>];

    RemadeStates(const GdnProblemView& the_problem, const GdnTask& the_task, Workspace& space)
        : StateGradientWalk<Engine, Input>(the_problem, the_task, space),
          new_values_copy(space.take<float>(this->sizes.tokens * this->sizes.value_row)) {
        for (std::int64_t i = 0; i < the_problem.group; ++i) {
            for (auto& record : records[i]) {
                record = ChunkRecord<Engine>(space, this->sizes);
            }
        }
    }

    /// H of the chunks begin .. end - 1, from the D that forward kept.
    void remake_states(const GdnBackwardTask& request, std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = 0; i < this->problem.group; ++i) {
            states[i] = State<Engine>::without_operand(records[i][0].state);
            this->load_transposed_state(states[i], this->state_of(checkpoint(request, begin), i));
            records[i][0].zero_state = states[i].zero;
        }
        for (std::int64_t c = begin; c + 1 < end; ++c) {
            this->keys.ahead.finish();
            look_ahead_at_writes(request, c + 1);
            if (c + 2 == end) {
                look_ahead_at_step(request, end - 1);
            }
            this->fill_keys(c, KeyChunk<Engine>::Use::kWrites);
            for (std::int64_t i = 0; i < this->problem.group; ++i) {
                remake_next(request, c, i, records[i][c + 1 - begin]);
            }
        }
    }

    void look_ahead_at_writes(const GdnBackwardTask& request, std::int64_t next) const {
        this->look_ahead_at_keys(this->problem.k, next);
        this->template look_ahead_at_values<float>(request.new_values, next);
    }
    /// What remaking a block of chunks starts from.
    void look_ahead_at_block(const GdnBackwardTask& request, std::int64_t begin) const {
        look_ahead_at_writes(request, begin);
        for (std::int64_t i = 0; i < this->problem.group && begin >= 0; ++i) {
            const float* state = this->state_of(checkpoint(request, begin), i);
            if (state != nullptr) {
                this->keys.ahead.add(state, this->problem.value_dim, this->problem.key_dim,
                                     this->columns);
            }
        }
    }
    /// The states at the start of chunk `begin`.
    [[nodiscard]] const float* checkpoint(const GdnBackwardTask& request,
                                          std::int64_t begin) const {
        return begin == 0 ? this->task.start
                          : request.checkpoints +
                                (begin / kCheckpointChunks<Engine> - 1) * request.checkpoint_stride;
    }
    /// Beside what remaking states has read already.
    void look_ahead_at_step(const GdnBackwardTask& request, std::int64_t next) const {
        this->look_ahead_at_key_record(next);
        this->look_ahead_at_keys(this->problem.q, next);
        this->template look_ahead_at_values<Input>(request.d_o, next);
    }
    /// What the end of a step reads and writes: asked for in the step, to be still near by then.
    void look_ahead_at_results(const GdnBackwardTask& request, std::int64_t c) const {
        this->template look_ahead_at_values<Input>(request.dv, c);
        this->template look_ahead_at_values<Input>(this->problem.v, c);
        this->look_ahead_at_keys(request.dq, c);
        this->look_ahead_at_keys(request.dk, c);
    }
    [[nodiscard]] TokenRows<float> new_value_rows(const GdnBackwardTask& request,
                                                  std::int64_t c,
                                                  std::int64_t i) const {
        return this->value_rows(request.new_values, c, i, new_values_copy);
    }
    /// dH' that the walk of the state's gradient left.
    void take_gradient(const GdnBackwardTask& request, std::int64_t c, std::int64_t i) {
        const bool is_zero = request.d_end == nullptr && c + 1 == this->chunks.size();
        const float* from = this->record_of(request.records, c, i).gradient;
        transpose_values(this->sizes.transposed(), is_zero ? nullptr : from, this->gradients[i]);
    }

  private:
    /// H at the end of chunk c.
    void remake_next(const GdnBackwardTask& request,
                     std::int64_t c,
                     std::int64_t i,
                     ChunkRecord<Engine>& next) {
        alignas(64) double b[kMostChunkTokens];
        this->head.fill_gates(this->problem, this->keys, this->value_head(i), this->chunks.token(c),
                              b);
        pack_writes(this->sizes, this->keys, this->head, new_value_rows(request, c, i),
                    this->scratch);
        const float* old = states[i].values;
        states[i].values = next.state;
        write_values_transposed(this->sizes, this->keys, this->head, old, states[i], this->scratch,
                                this->gradient_scratch.left);
        next.zero_state = false;
    }
};

}  // namespace hybridcp::HCP_ISA
