// Walks over the chunks of a segment for one key head and its value heads: outputs, and summaries.
#pragma once

#include "kernels/gdn/fused/walk.h"

namespace hybridcp::HCP_ISA {

template <typename Engine, typename Input>
struct OutputWalk : Walk<Engine, Input> {
    /// What is written is read by backward, long after. Where tiles are, a line that is not near
    /// takes four times as long to write as past the caches.
    static constexpr bool kStreams = Engine::kTiles;
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
            this->keys.ahead.finish();
            this->look_ahead_at_keys(this->problem.k, c + 1);
            this->look_ahead_at_keys(this->problem.q, c + 1);
            this->look_ahead_at_key_record(c + 1);
            this->template look_ahead_at_values<Input>(this->problem.v, c + 1);
            if constexpr (!kStreams) {
                this->template look_ahead_at_values<float>(forward.new_values, c + 1);
                this->template look_ahead_at_values<Input>(forward.o, c + 1);
                look_ahead_at_checkpoint(forward, c + 1);
            }
            this->fill_keys(c, KeyChunk<Engine>::Use::kOutputs);
            for (std::int64_t i = 0; i < this->problem.group; ++i) {
                if (float* checkpoint = checkpoint_before(forward, c)) {
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
    /// Where the states before chunk c are kept; null for most.
    [[nodiscard]] float* checkpoint_before(const GdnForwardTask& forward, std::int64_t c) const {
        return c > 0 && this->chunks.contains(c) && c % kCheckpointChunks<Engine> == 0
                   ? forward.checkpoints +
                         (c / kCheckpointChunks<Engine> - 1) * forward.checkpoint_stride
                   : nullptr;
    }
    void look_ahead_at_checkpoint(const GdnForwardTask& forward, std::int64_t next) const {
        const float* checkpoint = checkpoint_before(forward, next);
        for (std::int64_t i = 0; checkpoint != nullptr && i < this->problem.group; ++i) {
            this->keys.ahead.add(this->state_of(checkpoint, i), this->problem.value_dim,
                                 this->problem.key_dim, this->columns);
        }
    }
    void step(const GdnForwardTask& forward, std::int64_t c, std::int64_t i) {
        this->fill_head(c, i);
        const TokenRows<Input> v = this->value_rows(this->problem.v, c, i, this->value_copy);
        const auto new_rows = this->template output_rows<float, kStreams>(forward.new_values, c, i);
        new_values<true>(
            this->sizes, this->keys, this->head, states[i],
            [v](int r, int j) { return load(v.row(r) + j); },
            [new_rows](int r, int j, Vec d) { new_rows.put(r, j, d); }, this->scratch);
        outputs(this->problem, this->sizes, this->keys, this->head, states[i], this->scratch,
                this->template output_rows<Input, kStreams>(forward.o, c, i));
        write_values(this->sizes, this->keys, this->head, states[i].values, states[i],
                     this->scratch);
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
            this->keys.ahead.finish();
            this->look_ahead_at_keys(this->problem.k, c + 1);
            this->template look_ahead_at_values<Input>(this->problem.v, c + 1);
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
        const TokenRows<Input> v = this->value_rows(this->problem.v, c, i, this->value_copy);
        new_values<false>(
            this->sizes, this->keys, this->head, states[i],
            [v](int r, int j) { return load(v.row(r) + j); }, [](int, int, Vec) {}, this->scratch);
        write_values(this->sizes, this->keys, this->head, states[i].values, states[i],
                     this->scratch);
        if (has_map) {
            new_values<false>(
                map_sizes, this->keys, this->head, maps[i], [](int, int) { return Vec{}; },
                [](int, int, Vec) {}, map_scratch);
            write_values(map_sizes, this->keys, this->head, maps[i].values, maps[i], map_scratch);
        }
    }
};

}  // namespace hybridcp::HCP_ISA
