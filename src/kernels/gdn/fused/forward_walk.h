// Walks over the chunks of a segment for one key head and its value heads: outputs, and summaries.
#pragma once

#include "kernels/gdn/fused/forward_step.h"

namespace hybridcp::HCP_ISA {

inline constexpr int kMostValueHeads = 64;  // of one key head

/// Chunks from one checkpoint to the next: backward recomputes that many at a time.
inline constexpr int kCheckpointChunks = 8;

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

    Walk(const GdnProblemView& the_problem, const GdnTask& the_task, Workspace& space)
        : problem(the_problem),
          task(the_task),
          columns(the_task.column_end - the_task.column_begin),
          sizes(Engine::kChunk, the_problem.key_dim, columns),
          chunks(the_task, Engine::kChunk),
          keys(space, sizes),
          head(space, sizes),
          scratch(space, sizes) {}

    [[nodiscard]] std::int64_t value_head(std::int64_t i) const {
        return task.key_head * problem.group + i;
    }

    void fill_keys(std::int64_t chunk, Use use) {
        keys.template fill<Input>(problem, sizes, task.key_head, chunks.token(chunk),
                                  chunks.count(chunk), use);
    }
    void fill_head(std::int64_t chunk, std::int64_t i) {
        head.fill(problem, sizes, keys, value_head(i), chunks.token(chunk));
    }
    /// Asks for what chunk `next` will read, or where it will write.
    template <bool kWrite, typename T>
    void prefetch(const GdnView& view, std::int64_t next, std::int64_t heads, int dim) const {
        if (view.data != nullptr && chunks.contains(next)) {
            for (std::int64_t i = 0; i < heads; ++i) {
                prefetch_rows<kWrite>(
                    at_token<const T>(view, chunks.token(next), task.key_head * heads + i),
                    view.token_stride, chunks.count(next), dim);
            }
        }
    }
    void prefetch_inputs(std::int64_t next, bool outputs) const {
        if (outputs) {
            prefetch<false, Input>(problem.q, next, 1, problem.key_dim);
        }
        prefetch<false, Input>(problem.k, next, 1, problem.key_dim);
        prefetch<false, Input>(problem.v, next, problem.group, problem.value_dim);
    }

    /// Rows of v (or another view of its shape) into `to`.
    __attribute__((noinline)) void load_values(const GdnView& view,
                                               std::int64_t chunk,
                                               std::int64_t i,
                                               float* to) const {
        load_rows(
            at_token<const Input>(view, chunks.token(chunk), value_head(i)) + task.column_begin,
            view.token_stride, keys.count, columns, to, sizes.value_row, keys.rows, sizes.values);
    }
    /// States of value head i in a tensor of states; null stays null.
    template <typename T>
    [[nodiscard]] T* state_of(T* states, std::int64_t i) const {
        return states == nullptr ? nullptr : states + i * task.state_stride + task.column_begin;
    }
    void load_state(State<Engine>& state, const float* from) const {
        state.load_from(sizes, from, problem.value_dim, problem.key_dim, columns);
    }
    void store_state(const State<Engine>& state, float* to) const {
        state.store_to(sizes, to, problem.value_dim, problem.key_dim, columns);
    }
};

template <typename Engine, typename Input>
struct OutputWalk : Walk<Engine, Input> {
    State<Engine> states[kMostValueHeads];

    OutputWalk(const GdnProblemView& the_problem, const GdnTask& the_task, Workspace& space)
        : Walk<Engine, Input>(the_problem, the_task, space) {
        for (std::int64_t i = 0; i < the_problem.group; ++i) {
            states[i] = State<Engine>(space, this->sizes);
        }
    }

    void run(const GdnForwardTask& forward) {
        for (std::int64_t i = 0; i < this->problem.group; ++i) {
            this->load_state(states[i], this->state_of(this->task.start, i));
        }
        for (std::int64_t c = 0; c < this->chunks.size(); ++c) {
            this->prefetch_inputs(c + 1, true);
            this->template prefetch<true, Input>(forward.o, c, this->problem.group,
                                                 this->problem.value_dim);
            this->fill_keys(c, KeyChunk<Engine>::Use::kOutputs);
            for (std::int64_t i = 0; i < this->problem.group; ++i) {
                if (c > 0 && c % kCheckpointChunks == 0) {
                    float* checkpoint = forward.checkpoints +
                                        (c / kCheckpointChunks - 1) * forward.checkpoint_stride;
                    this->store_state(states[i], this->state_of(checkpoint, i));
                }
                step(forward, c, i);
            }
        }
        for (std::int64_t i = 0; i < this->problem.group; ++i) {
            this->store_state(states[i], this->state_of(this->task.end, i));
        }
    }

  private:
    void step(const GdnForwardTask& forward, std::int64_t c, std::int64_t i) {
        this->fill_head(c, i);
        this->load_values(this->problem.v, c, i, this->scratch.values);
        new_values(this->sizes, this->keys, this->head, states[i], this->scratch.values);
        outputs(this->problem, this->sizes, this->keys, this->head, states[i], this->scratch);
        store_rows(this->scratch.outputs, this->sizes.value_row, this->keys.count, this->columns,
                   at_token<Input>(forward.o, this->chunks.token(c), this->value_head(i)) +
                       this->task.column_begin,
                   forward.o.token_stride);
        write_values(this->sizes, this->keys, this->head, states[i].values, this->scratch.values,
                     states[i], this->scratch);
    }
};

/// S is the end state from a zero start. M is the end state from I when nothing is written: the
/// same recurrence on K columns.
template <typename Engine, typename Input>
struct SummaryWalk : Walk<Engine, Input> {
    ChunkSizes map_sizes;
    ForwardScratch<Engine> map_scratch;
    State<Engine> states[kMostValueHeads], maps[kMostValueHeads];

    SummaryWalk(const GdnProblemView& the_problem, const GdnTask& the_task, Workspace& space)
        : Walk<Engine, Input>(the_problem, the_task, space),
          map_sizes(Engine::kChunk, the_problem.key_dim, the_problem.key_dim),
          map_scratch(space, map_sizes) {
        for (std::int64_t i = 0; i < the_problem.group; ++i) {
            states[i] = State<Engine>(space, this->sizes);
            maps[i] = State<Engine>(space, map_sizes);
        }
    }

    void run(const GdnSummaryTask& summary) {
        std::int64_t first = this->chunks.size();
        for (std::int64_t i = 0; i < this->problem.group; ++i) {
            this->load_state(states[i], nullptr);
            maps[i].load_identity(map_sizes);
            first = summary.first_chunks[i] < first ? summary.first_chunks[i] : first;
        }
        for (std::int64_t c = first; c < this->chunks.size(); ++c) {
            this->prefetch_inputs(c + 1, false);
            this->fill_keys(c, KeyChunk<Engine>::Use::kStates);
            for (std::int64_t i = 0; i < this->problem.group; ++i) {
                if (c >= summary.first_chunks[i]) {
                    step(c, i, summary.has_map[i]);
                }
            }
        }
        for (std::int64_t i = 0; i < this->problem.group; ++i) {
            this->store_state(states[i], this->state_of(this->task.end, i));
            if (summary.has_map[i]) {
                const int dim = this->problem.key_dim;
                maps[i].store_to(map_sizes, summary.map + i * summary.map_stride, dim, dim, dim);
            }
        }
    }

  private:
    void step(std::int64_t c, std::int64_t i, bool has_map) {
        this->fill_head(c, i);
        this->load_values(this->problem.v, c, i, this->scratch.values);
        new_values(this->sizes, this->keys, this->head, states[i], this->scratch.values);
        write_values(this->sizes, this->keys, this->head, states[i].values, this->scratch.values,
                     states[i], this->scratch);
        if (has_map) {
            load_rows(static_cast<const float*>(nullptr), 0, 0, 0, map_scratch.values,
                      map_sizes.value_row, this->keys.rows, map_sizes.values);
            new_values(map_sizes, this->keys, this->head, maps[i], map_scratch.values);
            write_values(map_sizes, this->keys, this->head, maps[i].values, map_scratch.values,
                         maps[i], map_scratch);
        }
    }
};

}  // namespace hybridcp::HCP_ISA
