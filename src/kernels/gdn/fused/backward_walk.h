// Walks against time: gradients of a segment, and its gradient summary.
#pragma once

#include "kernels/gdn/fused/backward_sums.h"
#include "kernels/gdn/fused/key_gradients.h"
#include "kernels/gdn/fused/state_gradient_walk.h"

namespace hybridcp::HCP_ISA {

/// All gradients. The states that forward did not keep are made again from its checkpoints, a few
/// chunks at a time, before the walk over those chunks.
template <typename Engine, typename Input>
struct BackwardWalk : StateGradientWalk<Engine, Input> {
    KeyGradients sums;
    State<Engine> states[kMostValueHeads];
    float* dbeta;            // [C]
    float* new_values_copy;  // [C, V]
    ChunkRecord<Engine> records[kMostValueHeads][kCheckpointChunks];

    BackwardWalk(const GdnProblemView& the_problem, const GdnTask& the_task, Workspace& space)
        : StateGradientWalk<Engine, Input>(the_problem, the_task, space),
          sums(space, this->sizes),
          dbeta(space.take<float>(this->sizes.tokens)),
          new_values_copy(space.take<float>(this->sizes.tokens * this->sizes.value_row)) {
        for (std::int64_t i = 0; i < the_problem.group; ++i) {
            states[i] = State<Engine>::borrowed(space, this->sizes);
            for (auto& record : records[i]) {
                record = ChunkRecord<Engine>(space, this->sizes);
            }
        }
    }

    void run(const GdnBackwardTask& request) {
        for (std::int64_t i = 0; i < this->problem.group; ++i) {
            this->load_state(this->gradients[i], this->state_of(request.d_end, i));
        }
        const std::int64_t num_chunks = this->chunks.size();
        for (std::int64_t begin = (num_chunks - 1) / kCheckpointChunks * kCheckpointChunks;
             begin >= 0; begin -= kCheckpointChunks) {
            const std::int64_t rest = num_chunks - begin;
            const std::int64_t end = begin + (rest < kCheckpointChunks ? rest : kCheckpointChunks);
            remake_states(request, begin, end);
            for (std::int64_t c = end - 1; c >= begin; --c) {
                step(request, c);
            }
        }
        for (std::int64_t i = 0; i < this->problem.group && this->task.end != nullptr; ++i) {
            this->store_state(this->gradients[i], this->state_of(this->task.end, i));
        }
    }

  private:
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
                                (begin / kCheckpointChunks - 1) * request.checkpoint_stride;
    }
    void look_ahead_at_step(const GdnBackwardTask& request, std::int64_t next) const {
        look_ahead_at_writes(request, next);
        this->look_ahead_at_keys(this->problem.q, next);
        this->template look_ahead_at_values<Input>(request.d_o, next);
    }
    /// What its end reads and writes: asked for in the step itself, to be still near by then.
    void look_ahead_at_results(const GdnBackwardTask& request, std::int64_t c) const {
        this->template look_ahead_at_values<Input>(request.dv, c);
        this->template look_ahead_at_values<Input>(this->problem.v, c);
        this->look_ahead_at_keys(request.dq, c);
        this->look_ahead_at_keys(request.dk, c);
    }

    /// H of the chunks begin .. end - 1, from the D that forward kept.
    void remake_states(const GdnBackwardTask& request, std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = 0; i < this->problem.group; ++i) {
            states[i].borrow(records[i][0].state);
            this->load_state(states[i], this->state_of(checkpoint(request, begin), i));
            records[i][0].zero_state = states[i].zero;
        }
        for (std::int64_t c = begin; c + 1 < end; ++c) {
            this->keys.ahead.finish();
            if (c + 2 < end) {
                look_ahead_at_writes(request, c + 1);
            } else {
                look_ahead_at_step(request, end - 1);
            }
            this->fill_keys(c, KeyChunk<Engine>::Use::kWrites);
            for (std::int64_t i = 0; i < this->problem.group; ++i) {
                remake_next(request, c, i, records[i][c + 1 - begin]);
            }
        }
    }

    /// H at the end of chunk c.
    void remake_next(const GdnBackwardTask& request,
                     std::int64_t c,
                     std::int64_t i,
                     ChunkRecord<Engine>& next) {
        alignas(64) double b[kMostChunkTokens];
        this->head.fill_gates(this->problem, this->keys, this->value_head(i), this->chunks.token(c),
                              b);
        pack_writes(this->sizes, this->keys, this->head,
                    this->value_rows(request.new_values, c, i, new_values_copy), this->scratch);
        const float* old = states[i].values;
        states[i].borrow(next.state);
        write_values(this->sizes, this->keys, this->head, old, states[i], this->scratch);
        next.zero_state = false;
    }

    void step(const GdnBackwardTask& request, std::int64_t c) {
        const std::int64_t token = this->chunks.token(c), key_head = this->task.key_head;
        this->keys.ahead.finish();
        look_ahead_at_results(request, c);
        if (c % kCheckpointChunks != 0) {
            look_ahead_at_step(request, c - 1);
        } else {
            look_ahead_at_block(request, c - kCheckpointChunks);  // what is made again next
        }
        this->fill_keys(c, KeyChunk<Engine>::Use::kGradients);
        for (std::int64_t i = 0; i < this->problem.group; ++i) {
            head_step(request, c, i);
        }
        add_pair_products(this->sizes, this->keys, this->gradient_scratch, sums);
        const bool normalised = this->problem.use_qk_l2norm;
        const auto rows_of = [&](const GdnView& view) {
            return OutputRows<Input>{.data = at_token<Input>(view, token, key_head),
                                     .stride = view.token_stride,
                                     .count = this->keys.count,
                                     .dim = this->problem.key_dim};
        };
        store_key_gradient(this->sizes, this->keys.q, this->keys.q_inverse, normalised, sums.dq,
                           rows_of(request.dq));
        store_key_gradient(this->sizes, this->keys.k, this->keys.k_inverse, normalised, sums.dk,
                           rows_of(request.dk));
    }

    void head_step(const GdnBackwardTask& request, std::int64_t c, std::int64_t i) {
        BackwardScratch<Engine>& products = this->gradient_scratch;
        State<Engine>& gradient = this->gradients[i];
        const ChunkRecord<Engine>& record = records[i][c % kCheckpointChunks];
        this->fill_head(c, i);
        const TokenRows<Input> v = this->value_rows(this->problem.v, c, i, this->value_copy);
        const OutputRows<Input> dv = this->template output_rows<Input>(request.dv, c, i);
        pack_output_gradient(this->problem, this->sizes, this->keys, this->head,
                             this->output_gradient_rows(request.d_o, c, i), products);
        read_gradient(this->sizes, this->keys, this->head, gradient, products);
        sum_writes(this->sizes, this->keys,
                   this->value_rows(request.new_values, c, i, new_values_copy), gradient, products);
        solved_gradient(
            this->sizes, this->keys, this->head, gradient,
            [&](int r, int j, Vec dr) { dv.put(r, j, this->head.beta[r] * dr); }, products);
        gradient_products(this->sizes, this->keys, record, gradient, products);
        sum_rows(
            this->problem, this->sizes, this->keys, this->head, v, products,
            {.is_first = i == 0, .has_state = !record.zero_state, .has_gradient = !gradient.zero},
            sums, dbeta);
        sum_pairs(this->problem, this->sizes, this->keys, this->head, products, i == 0, sums,
                  dbeta);
        double through = 0;
        if (!gradient.zero && !record.zero_state) {
            through = static_cast<double>(this->head.decay) *
                      state_product<Engine>(this->sizes, record.state, gradient.values);
        }
        sum_log_decay_gradient(this->problem, this->keys, products, through, request.dg,
                               this->chunks.token(c), this->value_head(i));
        for (int r = 0; r < this->keys.count; ++r) {
            *at_token<float>(request.dbeta, this->chunks.token(c) + r, this->value_head(i)) =
                dbeta[r];
        }
        update_gradient(this->sizes, this->keys, this->head, gradient, products);
    }
};

}  // namespace hybridcp::HCP_ISA
