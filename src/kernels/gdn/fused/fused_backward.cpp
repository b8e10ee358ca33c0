// Backward of the fused backend: tasks to threads.

#include "hybridcp/error.h"
#include "kernels/gdn/fused/fused_call.h"
#include "kernels/gdn/fused/window_jobs.h"

namespace hybridcp::gdn {

struct FusedCall::Windows {
    std::int64_t blocks;                                       // of a window
    std::array<at::Tensor, WindowJobs::kWindowsKept> records;  // [N, Hv, chunks, ...]
};

GdnGradients FusedCall::backward(const at::Tensor& d_o, const at::Tensor& dS_end) {
    check_optional_shape(d_o, "d_o", problem_.inputs.v.sizes());
    check_optional_shape(dS_end, "dS_end", state_shape());
    HCP_CHECK(checkpoints_.defined(), "gdn: backward needs forward first");
    GdnGradients result{.dq = at::empty(q_.sizes(), q_.options()),
                        .dk = at::empty(k_.sizes(), k_.options()),
                        .dv = at::empty(v_.sizes(), v_.options()),
                        .dg = at::empty(g_.sizes(), g_.options()),
                        .dbeta = at::empty(g_.sizes(), g_.options()),
                        .dS_start = zero_states(problem_.value_dim())};
    use_huge_pages({result.dq, result.dk, result.dv});
    for (const at::Tensor* tensor :
         {&result.dq, &result.dk, &result.dv, &result.dg, &result.dbeta}) {
        clear_padding(*tensor);
    }
    const Upstream upstream{
        .d_o = d_o.defined() ? with_dense_rows(d_o.to(v_.scalar_type())) : d_o,
        .dS_end = dS_end.defined() ? dS_end.to(at::kFloat).contiguous() : dS_end};
    if (num_checkpoints_ > 0 && few_tasks()) {
        backward_in_windows(upstream, result);
    } else {
        backward_whole(upstream, result);
    }
    result.dg = result.dg.to(problem_.inputs.g.scalar_type());
    result.dbeta = result.dbeta.to(problem_.inputs.beta.scalar_type());
    return result;
}

GdnBackwardTask FusedCall::backward_task(const GdnTask& task,
                                         const Upstream& upstream,
                                         GdnGradients& result) const {
    return {.task = task,
            .d_o = upstream.d_o.defined() ? view_of(upstream.d_o) : GdnView{},
            .new_values = view_of(new_values_),
            .dq = view_of(result.dq),
            .dk = view_of(result.dk),
            .dv = view_of(result.dv),
            .dg = view_of(result.dg),
            .dbeta = view_of(result.dbeta)};
}

void FusedCall::backward_whole(const Upstream& upstream, GdnGradients& result) const {
    run_tasks(view_.value_dim, [&](GdnTask task, std::int64_t segment, void* workspace) {
        task.start = states_at(S_start_, segment, task.key_head);
        task.end = states_at(result.dS_start, segment, task.key_head);
        use_key_records(task, segment, 0);
        GdnBackwardTask backward = backward_task(task, upstream, result);
        backward.d_end = states_at(upstream.dS_end, segment, task.key_head);
        backward.checkpoints = checkpoint_at(checkpoints_, segment, task.key_head);
        backward.checkpoint_stride = checkpoints_.stride(0);
        kernels_.backward(view_, backward, workspace);
    });
}

/// Also where threads are left over the bits are those of backward_whole.
void FusedCall::backward_in_windows(const Upstream& upstream, GdnGradients& result) const {
    std::int64_t longest = 1;
    for (std::int64_t i = 0; i < problem_.num_segments(); ++i) {
        longest = std::max(longest, num_blocks(i));
    }
    const std::int64_t wanted = (max_threads() + num_tasks() - 1) / num_tasks();
    Windows windows{.blocks = std::min(longest, wanted), .records = {}};
    for (at::Tensor& records : windows.records) {
        records =
            at::empty({problem_.num_segments(), problem_.value_heads(),
                       windows.blocks * chunks_of_block(), kernels_.gradient_record_floats(view_)},
                      g_.options());
    }
    const int columns = columns_of_walk();
    const WindowJobs jobs{.tasks = num_tasks(),
                          .windows = (longest + windows.blocks - 1) / windows.blocks,
                          .parts = parts_of(columns),
                          .blocks = windows.blocks};
    jobs.run(
        [&](std::int64_t task, std::int64_t window, std::int64_t part) {
            walk_window(windows, window, task_at(task * jobs.parts + part, columns), upstream,
                        result);
        },
        [&](std::int64_t task, std::int64_t window, std::int64_t block) {
            finish_block(windows, window * windows.blocks + block, task_at(task, view_.value_dim),
                         upstream, result);
        });
}

void FusedCall::walk_window(const Windows& windows,
                            std::int64_t window,
                            SegmentTask walk,
                            const Upstream& upstream,
                            GdnGradients& result) const {
    auto [task, segment] = walk;
    const std::int64_t begin = task.token_begin, end = task.token_end;
    const std::int64_t first = window * windows.blocks, next = first + windows.blocks;
    const std::int64_t last = std::max<std::int64_t>(num_blocks(segment) - 1, 0);
    if (first > last) {
        return;
    }
    task.token_begin = token_of_block(begin, first);
    task.token_end = std::min(token_of_block(begin, next), end);
    task.end = states_at(result.dS_start, segment, task.key_head);
    use_key_records(task, segment, first);
    const GdnStateGradientTask gradient{
        .task = task,
        .d_o = upstream.d_o.defined() ? view_of(upstream.d_o) : GdnView{},
        .d_end = next > last ? states_at(upstream.dS_end, segment, task.key_head) : task.end,
        .records = records_at(windows, segment, task.key_head, first),
        .dv = view_of(result.dv)};
    kernels_.state_gradient(view_, gradient, thread_workspace(workspace_bytes_));
}

void FusedCall::finish_block(const Windows& windows,
                             std::int64_t block,
                             SegmentTask whole,
                             const Upstream& upstream,
                             GdnGradients& result) const {
    auto [task, segment] = whole;
    if (block >= num_blocks(segment)) {
        return;
    }
    const std::int64_t begin = task.token_begin, end = task.token_end;
    const std::int64_t key_head = task.key_head;
    task.token_begin = token_of_block(begin, block);
    task.token_end = std::min(token_of_block(begin, block + 1), end);
    task.start = block == 0 ? states_at(S_start_, segment, key_head)
                            : checkpoint_at(checkpoints_, segment, key_head) +
                                  (block - 1) * checkpoints_.stride(0);
    use_key_records(task, segment, block);
    GdnBackwardTask backward = backward_task(task, upstream, result);
    backward.records = records_at(windows, segment, key_head, block);
    backward.d_end = task.token_end == end ? states_at(upstream.dS_end, segment, key_head)
                                           : backward.records.data;
    kernels_.backward(view_, backward, thread_workspace(workspace_bytes_));
}

GdnGradientRecords FusedCall::records_at(const Windows& windows,
                                         std::int64_t segment,
                                         std::int64_t key_head,
                                         std::int64_t block) const {
    const auto window = static_cast<std::size_t>(block / windows.blocks);
    const at::Tensor& records = windows.records.at(window % windows.records.size());
    return {.data = records.data_ptr<float>() + segment * records.stride(0) +
                    key_head * group_ * records.stride(1) +
                    block % windows.blocks * chunks_of_block() * records.stride(2),
            .chunk_stride = records.stride(2),
            .head_stride = records.stride(1)};
}

}  // namespace hybridcp::gdn
