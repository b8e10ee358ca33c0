// Walks against time: gradients of a segment, and its gradient summary.
#pragma once

#include "kernels/gdn/fused/backward_sums.h"
#include "kernels/gdn/fused/key_gradients.h"
#include "kernels/gdn/fused/row_sums.h"
#include "kernels/gdn/fused/solved_rows.h"

namespace hybridcp::HCP_ISA {

/// All gradients.
template <typename Engine, typename Input>
struct BackwardWalk : SolvedRows<Engine, Input> {
    KeyGradients sums;
    float* dbeta;            // [C]
    Input *q_copy, *k_copy;  // [C, K]

    BackwardWalk(const GdnProblemView& the_problem, const GdnTask& the_task, Workspace& space)
        : SolvedRows<Engine, Input>(the_problem, the_task, space),
          sums(space, this->sizes),
          dbeta(space.take<float>(this->sizes.tokens)),
          q_copy(space.take<Input>(this->sizes.tokens * this->sizes.key_row)),
          k_copy(space.take<Input>(this->sizes.tokens * this->sizes.key_row)) {}

    void run(const GdnBackwardTask& request) {
        const bool is_whole = request.records.data == nullptr;
        for (std::int64_t i = 0; i < this->problem.group && is_whole; ++i) {
            this->load_transposed_state(this->gradients[i], this->state_of(request.d_end, i));
        }
        const std::int64_t num_chunks = this->chunks.size();
        for (std::int64_t begin =
                 (num_chunks - 1) / kCheckpointChunks<Engine> * kCheckpointChunks<Engine>;
             begin >= 0; begin -= kCheckpointChunks<Engine>) {
            const std::int64_t rest = num_chunks - begin;
            const std::int64_t end =
                begin + (rest < kCheckpointChunks<Engine> ? rest : kCheckpointChunks<Engine>);
            this->remake_states(request, begin, end);
            for (std::int64_t c = end - 1; c >= begin; --c) {
                step(request, c);
            }
        }
        for (std::int64_t i = 0; i < this->problem.group && is_whole; ++i) {
            this->store_transposed_state(this->gradients[i], this->state_of(this->task.end, i));
        }
    }

  private:
    void step(const GdnBackwardTask& request, std::int64_t c) {
        const std::int64_t token = this->chunks.token(c), key_head = this->task.key_head;
        this->keys.ahead.finish();
        this->look_ahead_at_results(request, c);
        if (c % kCheckpointChunks<Engine> != 0) {
            this->look_ahead_at_step(request, c - 1);
            this->look_ahead_at_record(request.records, c - 1);
        } else {
            this->look_ahead_at_block(request,
                                      c - kCheckpointChunks<Engine>);  // what is made again next
        }
        this->fill_keys(c, KeyChunk<Engine>::Use::kGradients);
        const SumInputs<Input> given{.q = this->key_rows(this->problem.q, c, q_copy),
                                     .k = this->key_rows(this->problem.k, c, k_copy)};
        for (std::int64_t i = 0; i < this->problem.group; ++i) {
            head_step(request, c, i, given);
        }
        const bool normalised = this->problem.use_qk_l2norm;
        const auto rows_of = [&](const GdnView& view) {
            return OutputRows<Input>{.data = at_token<Input>(view, token, key_head),
                                     .stride = view.token_stride,
                                     .count = this->keys.count,
                                     .dim = this->problem.key_dim};
        };
        store_key_gradient(this->sizes, given.q, this->keys.q_inverse, normalised, sums.dq,
                           rows_of(request.dq));
        store_key_gradient(this->sizes, given.k, this->keys.k_inverse, normalised, sums.dk,
                           rows_of(request.dk));
    }

    void head_step(const GdnBackwardTask& request,
                   std::int64_t c,
                   std::int64_t i,
                   SumInputs<Input> given) {
        BackwardScratch<Engine>& products = this->gradient_scratch;
        State<Engine>& gradient = this->gradients[i];
        const ChunkRecord<Engine>& record = this->records[i][c % kCheckpointChunks<Engine>];
        this->fill_head(c, i);
        const TokenRows<Input> v = this->value_rows(this->problem.v, c, i, this->value_copy);
        const bool is_whole = request.records.data == nullptr;
        if (!is_whole) {
            this->take_gradient(request, c, i);
        }
        const double through = static_cast<double>(this->head.decay) *
                               pack_states(this->sizes, record, gradient, is_whole, products);
        const TokenRows<float> solved =
            is_whole ? this->solve(request, c, i) : this->take_record(request, c, i);
        given.is_first = i == 0;
        given.has_state = !record.zero_state;
        given.has_gradient = !gradient.zero;
        pair_dots(this->sizes, this->keys, products);
        sum_pairs(this->problem, this->sizes, this->keys, this->head, products, i == 0, sums,
                  dbeta);
        const bool is_last = i + 1 == this->problem.group;
        if (is_last) {
            pack_pairs(this->sizes, this->keys, sums, products);
        }
        for (int k = 0; k < this->sizes.keys; k += kPanel) {
            row_products(this->sizes, this->keys, record.operand(products.state_operand), gradient,
                         products, k);
            sum_panel(this->problem, this->sizes, this->keys, this->head, products, given, sums, k);
            if (is_last) {
                add_pair_products(this->sizes, this->keys, products, sums, k);
            }
        }
        sum_rows(this->sizes, this->keys, this->head, v, solved, products, dbeta);
        sum_log_decay_gradient(this->problem, this->keys, products, through, request.dg,
                               this->chunks.token(c), this->value_head(i));
        for (int r = 0; r < this->keys.count; ++r) {
            *at_token<float>(request.dbeta, this->chunks.token(c) + r, this->value_head(i)) =
                dbeta[r];
        }
        if (is_whole) {
            update_gradient<true>(this->sizes, this->keys, this->head, gradient.values, gradient,
                                  products);
        }
    }
};

}  // namespace hybridcp::HCP_ISA
