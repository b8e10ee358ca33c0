// A call of the fused backend on the CPU: what its passes share. fused.cpp has what goes forward,
// fused_backward.cpp backward.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>

#include "kernels/gdn/backends.h"
#include "kernels/gdn/fused/chunk_windows.h"
#include "kernels/gdn/fused/fused_kernels.h"

namespace hybridcp::gdn {

/// The last dim without gaps; other strides stay.
[[nodiscard]] inline at::Tensor with_dense_rows(const at::Tensor& x) {
    return x.size(-1) == 1 || x.stride(-1) == 1 ? x : x.contiguous();
}

[[nodiscard]] inline GdnView view_of(const at::Tensor& x) {
    return {.data = x.data_ptr(), .token_stride = x.stride(0), .head_stride = x.stride(1)};
}

/// Scratch of one thread, kept from call to call.
[[nodiscard]] void* thread_workspace(std::int64_t bytes);

class FusedCall final : public GdnCall {
  public:
    FusedCall(Problem problem, const GdnKernelSet& kernels);

    [[nodiscard]] const std::vector<bool>* independent() const override {
        return &windows().independent;
    }
    [[nodiscard]] GdnSummary summary() override;
    [[nodiscard]] GdnOutput forward(const at::Tensor& S_start) override;
    /// Backward reads all that forward keeps.
    void release_intermediates() override {}
    [[nodiscard]] at::Tensor gradient_summary(const at::Tensor& d_o) override;
    [[nodiscard]] GdnGradients backward(const at::Tensor& d_o, const at::Tensor& dS_end) override;

  private:
    struct Upstream {
        at::Tensor d_o, dS_end;  // undefined for zeros
    };
    /// Windows of some blocks between checkpoints, and what the walks of the last few left.
    struct Windows;

    [[nodiscard]] std::int64_t num_tasks() const {
        return problem_.num_segments() * problem_.key_heads();
    }
    /// Whether segments and key heads alone would leave threads without work. What is done then
    /// gives the same bits: it may depend on the threads.
    [[nodiscard]] bool few_tasks() const;
    [[nodiscard]] int columns_of_task() const;
    /// Of the walk through a window, which has the blocks of another window beside it.
    [[nodiscard]] int columns_of_walk() const;
    /// Columns of V where they are split into so many parts.
    [[nodiscard]] int rounded_columns(std::int64_t parts) const;
    [[nodiscard]] std::int64_t parts_of(int columns) const {
        return (view_.value_dim + columns - 1) / columns;
    }

    struct SegmentTask {
        GdnTask task;
        std::int64_t segment;
    };
    /// Of all segments, key heads and ranges of `columns` of V.
    [[nodiscard]] SegmentTask task_at(std::int64_t index, int columns) const;
    /// body(task, segment, workspace) for each of them.
    template <typename Body>
    void run_tasks(int columns, Body body) const {
        parallel_tasks(num_tasks() * parts_of(columns), [&](std::int64_t index, int) {
            const auto [task, segment] = task_at(index, columns);
            body(task, segment, thread_workspace(workspace_bytes_));
        });
    }

    [[nodiscard]] GdnBackwardTask backward_task(const GdnTask& task,
                                                const Upstream& upstream,
                                                GdnGradients& result) const;
    void backward_whole(const Upstream& upstream, GdnGradients& result) const;
    void backward_in_windows(const Upstream& upstream, GdnGradients& result) const;
    void walk_window(const Windows& windows,
                     std::int64_t window,
                     SegmentTask walk,
                     const Upstream& upstream,
                     GdnGradients& result) const;
    void finish_block(const Windows& windows,
                      std::int64_t block,
                      SegmentTask whole,
                      const Upstream& upstream,
                      GdnGradients& result) const;
    [[nodiscard]] GdnGradientRecords records_at(const Windows& windows,
                                                std::int64_t segment,
                                                std::int64_t key_head,
                                                std::int64_t block) const;
    [[nodiscard]] std::int64_t chunks_of_block() const {
        return kernels_.checkpoint_tokens / kernels_.chunk_tokens;
    }
    [[nodiscard]] std::int64_t token_of_block(std::int64_t begin, std::int64_t block) const {
        return begin + block * kernels_.checkpoint_tokens;
    }
    /// Between checkpoints.
    [[nodiscard]] std::int64_t num_blocks(std::int64_t segment) const;

    /// Made on first use.
    [[nodiscard]] const ChunkWindows& windows() const;
    [[nodiscard]] std::size_t head_index(std::int64_t segment, std::int64_t key_head) const {
        return static_cast<std::size_t>(segment * problem_.value_heads() + key_head * group_);
    }

    [[nodiscard]] std::vector<std::int64_t> state_shape() const;
    [[nodiscard]] at::Tensor zero_states(std::int64_t columns) const;
    /// The states of a key head's value heads; null for an undefined tensor.
    [[nodiscard]] float* states_at(const at::Tensor& states,
                                   std::int64_t segment,
                                   std::int64_t key_head) const;
    /// The first of a segment's states at checkpoints.
    [[nodiscard]] float* checkpoint_at(const at::Tensor& states,
                                       std::int64_t segment,
                                       std::int64_t key_head) const;
    /// From the chunk on that starts block `block` of a segment.
    [[nodiscard]] float* key_records_at(std::int64_t segment,
                                        std::int64_t key_head,
                                        std::int64_t block) const;
    void use_key_records(GdnTask& task, std::int64_t segment, std::int64_t block) const;
    /// For tensors not written yet: fewer faults, and fewer walks of page tables.
    void use_huge_pages(std::initializer_list<at::Tensor> tensors) const;
    void clear_padding(const at::Tensor& x) const;
    void index_checkpoints();

    Problem problem_;
    const GdnKernels& kernels_;
    std::int64_t group_;
    at::Tensor q_, k_, v_, g_, beta_;
    GdnProblemView view_;
    std::int64_t workspace_bytes_ = 0;
    std::vector<std::int64_t> first_checkpoint_;  // of each segment
    std::int64_t num_checkpoints_ = 0;
    std::vector<std::int64_t> first_chunk_;  // of each segment
    std::int64_t num_chunks_ = 0;
    at::Tensor checkpoints_;  // [num_checkpoints, Hv, K, V]
    at::Tensor new_values_;   // [T, Hv, V], a head's rows next to each other
    at::Tensor key_records_;  // [Hk, num_chunks, ...]
    at::Tensor S_start_;
    mutable std::optional<ChunkWindows> windows_;
};

}  // namespace hybridcp::gdn
