// What every walk over the chunks of a segment shares: one key head and its value heads.
#pragma once

#include "kernels/gdn/fused/forward_step.h"
#include "kernels/gdn/fused/transposed_state.h"

namespace hybridcp::HCP_ISA {

inline constexpr int kMostValueHeads = 64;  // of one key head

/// Chunks from one checkpoint to the next, which backward makes again at a time.
template <typename Engine>
inline constexpr int kCheckpointChunks = 256 / Engine::kChunk;

/// The chunks of a task.
struct ChunkRange {
    std::int64_t begin, end;  // tokens
    int chunk_tokens;
    ChunkRange(const GdnTask& task, int tokens)
        : begin(task.token_begin), end(task.token_end), chunk_tokens(tokens) {}
    [[nodiscard]] std::int64_t size() const {
        return (end - begin + chunk_tokens - 1) / chunk_tokens;
    }
    [[nodiscard]] std::int64_t token(std::int64_t chunk) const {
        return begin + chunk * chunk_tokens;
    }
    [[nodiscard]] bool contains(std::int64_t chunk) const { return chunk >= 0 && chunk < size(); }
    [[nodiscard]] int count(std::int64_t chunk) const {
        const std::int64_t rest = end - token(chunk);
        return rest < chunk_tokens ? static_cast<int>(rest) : chunk_tokens;
    }
};

/// What a walk needs beside the states.
template <typename Engine, typename Input>
struct Walk {
    using Use = typename KeyChunk<Engine>::Use;

    const GdnProblemView& problem;
    const GdnTask& task;
    int columns;  // of V
    ChunkSizes sizes;
    ChunkRange chunks;
    KeyChunk<Engine> keys;
    HeadChunk head;
    ForwardScratch<Engine> scratch;
    Input* value_copy;  // [C, V]

    Walk(const GdnProblemView& the_problem, const GdnTask& the_task, Workspace& space)
        : problem(the_problem),
          task(the_task),
          columns(the_task.column_end - the_task.column_begin),
          sizes(Engine::kChunk, the_problem.key_dim, columns),
          chunks(the_task, Engine::kChunk),
          keys(space, sizes),
          head(space, sizes),
          scratch(space, sizes),
          value_copy(space.take<Input>(sizes.tokens * sizes.value_row)) {}

    [[nodiscard]] std::int64_t value_head(std::int64_t i) const {
        return task.key_head * problem.group + i;
    }

    void fill_keys(std::int64_t chunk, Use use) {
        keys.template fill<Input>(problem, sizes, task.key_head, chunks.token(chunk),
                                  chunks.count(chunk), use, key_record(chunk),
                                  task.key_records_made);
    }
    void fill_head(std::int64_t chunk, std::int64_t i) {
        head.fill(problem, sizes, keys, value_head(i), chunks.token(chunk));
    }
    [[nodiscard]] float* key_record(std::int64_t chunk) const {
        return task.key_records == nullptr
                   ? nullptr
                   : task.key_records + chunk * KeyRecord::floats(sizes.tokens);
    }
    void look_ahead_at_key_record(std::int64_t next) const {
        if (task.key_records != nullptr && chunks.contains(next)) {
            constexpr int row = 64;
            keys.ahead.add(key_record(next), row,
                           static_cast<int>(KeyRecord::floats(sizes.tokens) / row), row);
        }
    }
    /// Rows of keys or values of chunk `next`, to be asked for in the products of this one.
    void look_ahead_at_keys(const GdnView& view, std::int64_t next) const {
        if (view.data != nullptr && chunks.contains(next)) {
            keys.ahead.add(at_token<const Input>(view, chunks.token(next), task.key_head),
                           view.token_stride, chunks.count(next), problem.key_dim);
        }
    }
    template <typename T>
    void look_ahead_at_values(const GdnView& view, std::int64_t next) const {
        for (std::int64_t i = 0; i < problem.group; ++i) {
            if (view.data != nullptr && chunks.contains(next)) {
                keys.ahead.add(
                    at_token<const T>(view, chunks.token(next), value_head(i)) + task.column_begin,
                    view.token_stride, chunks.count(next), columns);
            }
        }
    }

    /// Rows of q or k; `copy` as in whole_rows.
    [[nodiscard]] TokenRows<Input> key_rows(const GdnView& view,
                                            std::int64_t chunk,
                                            Input* copy) const {
        return whole_rows<Input>(
            {at_token<const Input>(view, chunks.token(chunk), task.key_head), view.token_stride},
            keys.count, problem.key_dim, copy, keys.rows, sizes.keys);
    }
    /// Rows of v (or another view of its shape) of value head i; `copy` as in whole_rows.
    template <typename T>
    [[nodiscard]] TokenRows<T> value_rows(const GdnView& view,
                                          std::int64_t chunk,
                                          std::int64_t i,
                                          T* copy) const {
        const T* from = at_token<const T>(view, chunks.token(chunk), value_head(i));
        return whole_rows<T>({from + task.column_begin, view.token_stride}, keys.count, columns,
                             copy, keys.rows, sizes.values);
    }
    template <typename T, bool Streams = false>
    [[nodiscard]] OutputRows<T, Streams> output_rows(const GdnView& view,
                                                     std::int64_t chunk,
                                                     std::int64_t i) const {
        return {.data = at_token<T>(view, chunks.token(chunk), value_head(i)) + task.column_begin,
                .stride = view.token_stride,
                .count = keys.count,
                .dim = columns};
    }
    /// States of value head i in a tensor of states; null stays null.
    template <typename T>
    [[nodiscard]] T* state_of(T* states, std::int64_t i) const {
        return states == nullptr ? nullptr : states + i * task.state_stride + task.column_begin;
    }
    void load_state(State<Engine>& state, const float* from) const {
        state.load_from(sizes, from, problem.value_dim, problem.key_dim, columns);
    }
    void load_transposed_state(State<Engine>& state, const float* from) const {
        load_transposed(sizes.transposed(), from, problem.value_dim, problem.key_dim, columns,
                        state);
    }
    void store_transposed_state(const State<Engine>& state, float* to) const {
        store_transposed(sizes.transposed(), state, to, problem.value_dim, problem.key_dim,
                         columns);
    }
    void store_state(const State<Engine>& state, float* to) const {
        state.store_to(sizes, to, problem.value_dim, problem.key_dim, columns);
    }
};

}  // namespace hybridcp::HCP_ISA
