// The walk against time that carries the gradient of the state alone: gradient summaries, and what
// depends on the order of chunks where backward is split in two.
#pragma once

#include "kernels/gdn/fused/backward_step.h"
#include "kernels/gdn/fused/walk.h"

namespace hybridcp::HCP_ISA {

/// Only the state's gradient.
template <typename Engine, typename Input>
struct StateGradientWalk : Walk<Engine, Input> {
    BackwardScratch<Engine> gradient_scratch;
    State<Engine> gradients[kMostValueHeads];
    Input* d_o_copy;                     // [C, V]
    float* own_values[kMostValueHeads];  // of gradients that no record keeps

    StateGradientWalk(const GdnProblemView& the_problem, const GdnTask& the_task, Workspace& space)
        : Walk<Engine, Input>(the_problem, the_task, space), gradient_scratch(space, this->sizes) {
        this->keys.ahead.spare_short_blocks();
        d_o_copy = space.take<Input>(this->sizes.tokens * this->sizes.value_row);
        for (std::int64_t i = 0; i < the_problem.group; ++i) {
            gradients[i] = State<Engine>(space, this->sizes);
            own_values[i] = gradients[i].values;
        }
    }

    void run(const GdnStateGradientTask& request) {
        const auto count = [&](std::int64_t i) {
            return request.chunk_counts == nullptr ? this->chunks.size() : request.chunk_counts[i];
        };
        std::int64_t last = 0;
        for (std::int64_t i = 0; i < this->problem.group; ++i) {
            place_gradient(request, count(i) - 1, i);
            this->load_state(gradients[i], this->state_of(request.d_end, i));
            last = count(i) > last ? count(i) : last;
        }
        for (std::int64_t c = last - 1; c >= 0; --c) {
            this->keys.ahead.finish();
            this->look_ahead_at_keys(this->problem.k, c - 1);
            this->look_ahead_at_keys(this->problem.q, c - 1);
            this->look_ahead_at_key_record(c - 1);
            this->template look_ahead_at_values<Input>(request.d_o, c - 1);
            look_ahead_at_record(request.records, c - 2);
            this->fill_keys(c, KeyChunk<Engine>::Use::kStateGradients);
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

    /// What is left of chunk c: the task's columns.
    struct Record {
        float *gradient, *reads, *solved;
    };
    [[nodiscard]] Record record_of(const GdnGradientRecords& records,
                                   std::int64_t c,
                                   std::int64_t i) const {
        const std::int64_t row = row_of_records();
        float* first = records.data + c * records.chunk_stride + i * records.head_stride;
        float* reads = first + this->sizes.keys * row + this->task.column_begin;
        return {.gradient = first + this->sizes.keys * this->task.column_begin,
                .reads = reads,
                .solved = reads + this->sizes.tokens * row};
    }
    [[nodiscard]] std::int64_t row_of_records() const {
        return round_up(this->problem.value_dim, kPanel);
    }
    void look_ahead_at_record(const GdnGradientRecords& records, std::int64_t next) const {
        constexpr int row = 256;
        for (std::int64_t i = 0; i < this->problem.group; ++i) {
            if (records.data != nullptr && this->chunks.contains(next)) {
                const Record record = record_of(records, next, i);
                this->keys.ahead.add(record.gradient, row,
                                     this->sizes.keys * this->sizes.values / row, row);
                this->keys.ahead.add(record.reads, row_of_records(), 2 * this->sizes.tokens,
                                     this->columns);
            }
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
        if (request.records.data == nullptr) {
            solved_gradient(
                this->sizes, this->keys, this->head, gradients[i], [](int, int, Vec) {},
                gradient_scratch);
        } else {
            solve_and_keep(request, c, i);
        }
        const float* old = gradients[i].values;
        place_gradient(request, c - 1, i);
        update_gradient<false>(this->sizes, this->keys, this->head, old, gradients[i],
                               gradient_scratch);
    }

    /// From here on the gradient of value head i's state is where the record of chunk c has it.
    void place_gradient(const GdnStateGradientTask& request, std::int64_t c, std::int64_t i) {
        const bool is_kept = request.records.data != nullptr && this->chunks.contains(c);
        gradients[i].move_to(is_kept ? record_of(request.records, c, i).gradient : own_values[i]);
    }

    void solve_and_keep(const GdnStateGradientTask& request, std::int64_t c, std::int64_t i) {
        const Record record = record_of(request.records, c, i);
        const auto rows = [&](float* of) {
            return OutputRows<float>{.data = of,
                                     .stride = row_of_records(),
                                     .count = this->keys.count,
                                     .dim = this->columns};
        };
        if (!gradients[i].zero) {
            copy_rows(this->sizes, gradient_scratch.solved, rows(record.reads));
        }
        solved_gradient(
            this->sizes, this->keys, this->head, gradients[i],
            [beta = this->head.beta, solved = rows(record.solved),
             dv = this->template output_rows<Input>(request.dv, c, i)](int r, int j, Vec dr) {
                solved.put(r, j, dr);
                dv.put(r, j, beta[r] * dr);
            },
            gradient_scratch);
    }
};

}  // namespace hybridcp::HCP_ISA
