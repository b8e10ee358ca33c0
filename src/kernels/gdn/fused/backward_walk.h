// Walks against time: gradients of a segment, and its gradient summary.
#pragma once

#include "kernels/gdn/fused/backward_sums.h"
#include "kernels/gdn/fused/key_gradients.h"
#include "kernels/gdn/fused/remade_states.h"

namespace hybridcp::HCP_ISA {

/// All gradients.
template <typename Engine, typename Input>
struct BackwardWalk : RemadeStates<Engine, Input> {
    KeyGradients sums;
    float* dbeta;  // [C]

    BackwardWalk(const GdnProblemView& the_problem, const GdnTask& the_task, Workspace& space)
        : RemadeStates<Engine, Input>(the_problem, the_task, space),
          sums(space, this->sizes),
          dbeta(space.take<float>(this->sizes.tokens)) {}

    void run(const GdnBackwardTask& request) {
        const bool is_whole = request.records.data == nullptr;
        for (std::int64_t i = 0; i < this->problem.group && is_whole; ++i) {
            this->load_transposed_state(this->gradients[i], this->state_of(request.d_end, i));
        }
        const std::int64_t num_chunks = this->chunks.size();
        for (std::int64_t begin = (num_chunks - 1) / kCheckpointChunks * kCheckpointChunks;
             begin >= 0; begin -= kCheckpointChunks) {
            const std::int64_t rest = num_chunks - begin;
            const std::int64_t end = begin + (rest < kCheckpointChunks ? rest : kCheckpointChunks);
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
        if (c % kCheckpointChunks != 0) {
            this->look_ahead_at_step(request, c - 1);
            this->look_ahead_at_record(request.records, c - 1);
        } else {
            this->look_ahead_at_block(request, c - kCheckpointChunks);  // what is made again next
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
        const ChunkRecord<Engine>& record = this->records[i][c % kCheckpointChunks];
        this->fill_head(c, i);
        const TokenRows<Input> v = this->value_rows(this->problem.v, c, i, this->value_copy);
        const bool is_whole = request.records.data == nullptr;
        if (!is_whole) {
            this->take_gradient(request, c, i);
        }
        const double through = static_cast<double>(this->head.decay) *
                               pack_states(this->sizes, record, gradient, is_whole, products);
        const TokenRows<float> solved =
            is_whole ? solve(request, c, i) : take_record(request, c, i);
        gradient_products(this->sizes, this->keys, record.operand(products.state_operand), gradient,
                          products);
        sum_rows(this->problem, this->sizes, this->keys, this->head, v, products,
                 {.solved = solved,
                  .is_first = i == 0,
                  .has_state = !record.zero_state,
                  .has_gradient = !gradient.zero},
                 sums, dbeta);
        sum_pairs(this->problem, this->sizes, this->keys, this->head, products, i == 0, sums,
                  dbeta);
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

    /// dR, z and dv.
    TokenRows<float> solve(const GdnBackwardTask& request, std::int64_t c, std::int64_t i) {
        BackwardScratch<Engine>& products = this->gradient_scratch;
        State<Engine>& gradient = this->gradients[i];
        const TokenRows<float> solved{products.solved, this->sizes.value_row};
        pack_output_gradient(this->problem, this->sizes, this->keys, this->head,
                             this->output_gradient_rows(request.d_o, c, i), products);
        if (!gradient.zero) {
            read_gradient(this->sizes, this->keys, this->head,
                          {products.gradient_operand,
                           State<Engine>::transposed_panel(this->sizes.transposed())},
                          products);
        }
        sum_writes(this->sizes, this->keys, this->new_value_rows(request, c, i), solved, gradient,
                   products);
        solved_gradient(
            this->sizes, this->keys, this->head, gradient,
            [dv = this->template output_rows<Input>(request.dv, c, i), beta = this->head.beta](
                int r, int j, Vec dr) { dv.put(r, j, beta[r] * dr); },
            products);
        return solved;
    }

    /// dR and z that the walk of the state's gradient left.
    TokenRows<float> take_record(const GdnBackwardTask& request, std::int64_t c, std::int64_t i) {
        BackwardScratch<Engine>& products = this->gradient_scratch;
        const auto record = this->record_of(request.records, c, i);
        const auto rows_at = [&](const float* from, float* copy) {
            return whole_rows<float>({from, this->row_of_records()}, this->keys.count,
                                     this->columns, copy, this->keys.rows, this->sizes.values);
        };
        sum_writes(this->sizes, this->keys, this->new_value_rows(request, c, i),
                   rows_at(record.reads, this->scratch.outputs), this->gradients[i], products);
        const TokenRows<float> solved = rows_at(record.solved, products.solved);
        pack_rows<Engine>(this->sizes, this->keys.rows,
                          this->output_gradient_rows(request.d_o, c, i), products.rows);
        pack_rows<Engine>(
            this->sizes, this->keys.rows, solved,
            products.rows + this->keys.rows * BackwardScratch<Engine>::value_elements(this->sizes));
        return solved;
    }
};

}  // namespace hybridcp::HCP_ISA
