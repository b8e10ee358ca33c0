// dR of a chunk and what goes with it: solved for, or what the walk of the state's gradient left.
#pragma once

#include "kernels/gdn/fused/gradient_products.h"
#include "kernels/gdn/fused/gradient_states.h"
#include "kernels/gdn/fused/remade_states.h"

namespace hybridcp::HCP_ISA {

template <typename Engine, typename Input>
struct SolvedRows : RemadeStates<Engine, Input> {
    using RemadeStates<Engine, Input>::RemadeStates;

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
