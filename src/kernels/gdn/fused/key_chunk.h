// What the value heads of a key head share in a chunk: q and k, normalised, as operands, and their
// products. Legend: C rows of a chunk, of which `count` are tokens; rows behind them are zero.
#pragma once

#include "kernels/gdn/fused/key_rows.h"
#include "kernels/gdn/fused/workspace.h"

namespace hybridcp::HCP_ISA {

template <typename Engine>
struct KeyChunk : KeyRecord {
    using Element = typename Engine::Element;
    enum class Use { kOutputs, kStates, kWrites, kStateGradients, kGradients };

    int count = 0;              // tokens
    int rows = 0;               // count, rounded up to what products take
    int unit_rows = 0;          // rows of `tokens`
    Element *q_rows, *k_rows;   // [C, K] left operands, normalised
    std::uint32_t* k_columns;   // right operand, depth K, columns C
    std::uint32_t* tokens;      // right operand, depth K's rows (or [Q; K], 2C), columns K
    std::uint32_t* transposed;  // the same as a left operand, for tiles
    mutable RowsAhead ahead;    // of the next chunk
    float* copy;                // [C, K] rows of inputs that have to be filled up
    float* own_record;

    KeyChunk(Workspace& space, const ChunkSizes& sizes) {
        copy = space.take<float>(sizes.tokens * sizes.key_row);
        q_rows = space.take<Element>(sizes.tokens * element_row(sizes));
        k_rows = space.take<Element>(sizes.tokens * element_row(sizes));
        k_columns = space.take<std::uint32_t>(sizes.keys * round_up(sizes.tokens, kPanel));
        tokens = space.take<std::uint32_t>(2 * sizes.tokens * sizes.keys);
        transposed = Engine::kTiles ? space.take<std::uint32_t>(transposed_left_units<Engine>(
                                          2 * sizes.tokens, sizes.keys))
                                    : nullptr;
        own_record = space.take<float>(floats(sizes.tokens));
    }

    /// Strides of q_rows and k_rows, in elements: of whole lines, not a power of two apart.
    static int element_row(const ChunkSizes& sizes) { return sizes.keys + 16 * Engine::kPerUnit; }
    static int columns_panel(const ChunkSizes& sizes) {
        return sizes.keys / Engine::kPerUnit * kPanel;
    }
    [[nodiscard]] int tokens_panel() const { return unit_rows / Engine::kPerUnit * kPanel; }
    /// K^T, or [Q; K]^T.
    [[nodiscard]] LeftOperand transposed_operand(const ChunkSizes& sizes) const {
        if constexpr (Engine::kTiles) {
            return transposed_left<Engine>(transposed, unit_rows, sizes.keys);
        } else {
            return {.units = tokens,
                    .row_stride = 1,
                    .unit_stride = kPanel,
                    .panel_stride = tokens_panel()};
        }
    }

    /// record: where kk, qk and the norms go, or null; `made`: they are there.
    template <typename Input>
    void fill(const GdnProblemView& problem,
              const ChunkSizes& sizes,
              std::int64_t key_head,
              std::int64_t token,
              int num_tokens,
              Use use,
              float* record,
              bool made) {
        static_cast<KeyRecord&>(*this) = at(record == nullptr ? own_record : record, sizes.tokens);
        count = num_tokens;
        rows = round_up(num_tokens, Engine::kRowMultiple);
        const bool gradients = use == Use::kGradients || use == Use::kStateGradients;
        unit_rows = gradients ? 2 * rows : rows;
        const auto load_keys = [&](const GdnView& view, float* inverse, const KeyRows<Engine>& to) {
            load_normalised<Input>(
                problem, sizes, {at_token<const Input>(view, token, key_head), view.token_stride},
                inverse, made, to);
        };
        const int row = element_row(sizes), panel = tokens_panel();
        const int first_k_unit = (unit_rows - rows) / Engine::kPerUnit;
        load_keys(problem.k, k_inverse, {k_rows, row, tokens + first_k_unit * kPanel, panel});
        const bool reads = use == Use::kOutputs || gradients;
        if (reads) {
            load_keys(problem.q, q_inverse, {q_rows, row, gradients ? tokens : nullptr, panel});
        }
        // What products read is packed before the first of them: tiles wait for stores.
        const bool multiplies = use != Use::kWrites && !made;
        if (multiplies) {
            pack_columns_as_depth<Engine>(k_rows, row, rows, sizes.keys, k_columns,
                                          columns_panel(sizes));
        }
        if (Engine::kTiles && use != Use::kWrites && use != Use::kGradients) {
            left_of_right<Engine>({tokens, panel}, unit_rows, sizes.keys, transposed);
        }
        if (multiplies) {
            product(sizes, k_rows, kk, 1.0F);
            if (reads) {
                product(sizes, q_rows, qk, problem.scale);
            }
        }
    }

  private:
    template <typename Input>
    void load_normalised(const GdnProblemView& problem,
                         const ChunkSizes& sizes,
                         TokenRows<Input> from,
                         float* inverse,
                         bool made,
                         const KeyRows<Engine>& to) {
        from = whole_rows(from, count, problem.key_dim, reinterpret_cast<Input*>(copy), rows,
                          sizes.keys);
        if (!made) {
            inverse_norms(from, rows, sizes.keys, problem.use_qk_l2norm, inverse);
        }
        scale_rows<Engine>(from, inverse, rows, sizes.keys, to);
    }

    __attribute__((noinline)) void product(const ChunkSizes& sizes,
                                           const Element* left,
                                           float* to,
                                           float factor) {
        const int depth = sizes.keys / Engine::kPerUnit;
        Engine::multiply(
            {.left = rows_left<Engine>(left, element_row(sizes)),
             .right = {k_columns, columns_panel(sizes)},
             .rows = rows,
             .columns = round_up(rows, kPanel),
             .ahead = ahead,
             .triangle = rows},
            [&](int) { return DepthRange{0, depth}; },
            [=, row = sizes.token_row](int i, int j, Vec first, Vec second) {
                store(to + i * row + j, first * factor);
                store(to + (i + 1) * row + j, second * factor);
            });
    }
};

}  // namespace hybridcp::HCP_ISA
