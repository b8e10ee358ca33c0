// The fused backend on the CPU: tensors to pointers, tasks to threads. What is computed is in
// fused_kernels.cpp, once per instruction set.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>

#include "hybridcp/error.h"
#include "kernels/gdn/backends.h"
#include "kernels/gdn/fused/chunk_windows.h"
#include "kernels/gdn/fused/fused_kernels.h"

namespace hybridcp::gdn {
namespace {

constexpr std::int64_t kLargestHeadDim = 256;
constexpr std::int64_t kLargestGroup = 64;

void check_support(const Problem& problem) {
    const at::Tensor& q = problem.inputs.q;
    if (!q.device().is_cpu()) {
        throw UsageError(fmt::format(
            "gdn: the fused backend runs on cpu, the inputs are on {}; choose backend eager",
            q.device().str()));
    }
    if (q.scalar_type() != at::kFloat && q.scalar_type() != at::kBFloat16) {
        throw UsageError(
            fmt::format("gdn: the fused backend takes float and bfloat16, not {}; "
                        "choose backend reference or eager",
                        c10::toString(q.scalar_type())));
    }
    if (problem.key_dim() > kLargestHeadDim || problem.value_dim() > kLargestHeadDim) {
        throw UsageError(fmt::format(
            "gdn: the fused backend takes head dims up to {}, not K = {} and V = {}; choose "
            "backend eager",
            kLargestHeadDim, problem.key_dim(), problem.value_dim()));
    }
    if (problem.value_heads() / problem.key_heads() > kLargestGroup) {
        throw UsageError(fmt::format(
            "gdn: the fused backend takes up to {} value heads a key head, not {}; choose backend "
            "eager",
            kLargestGroup, problem.value_heads() / problem.key_heads()));
    }
}

/// The last dim without gaps; other strides stay.
at::Tensor with_dense_rows(const at::Tensor& x) {
    return x.size(-1) == 1 || x.stride(-1) == 1 ? x : x.contiguous();
}

GdnView view_of(const at::Tensor& x) {
    return {.data = x.data_ptr(), .token_stride = x.stride(0), .head_stride = x.stride(1)};
}

/// Scratch of one thread, kept from call to call.
void* thread_workspace(std::int64_t bytes) {
    thread_local std::vector<std::byte> memory;
    constexpr std::int64_t kAlignment = 64;
    if (static_cast<std::int64_t>(memory.size()) < bytes + kAlignment) {
        memory.resize(static_cast<std::size_t>(bytes + kAlignment));
    }
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    return memory.data() + (kAlignment - address % kAlignment) % kAlignment;
}

class FusedCall final : public GdnCall {
  public:
    FusedCall(Problem problem, const GdnKernelSet& kernels)
        : problem_(std::move(problem)),
          kernels_(problem_.inputs.q.scalar_type() == at::kFloat ? kernels.fp32 : kernels.bf16),
          group_(problem_.value_heads() / problem_.key_heads()),
          q_(with_dense_rows(problem_.inputs.q)),
          k_(with_dense_rows(problem_.inputs.k)),
          v_(with_dense_rows(problem_.inputs.v)),
          g_(with_dense_rows(problem_.inputs.g.to(at::kFloat))),
          beta_(problem_.inputs.beta.to(at::kFloat)) {
        view_ = {.q = view_of(q_),
                 .k = view_of(k_),
                 .v = view_of(v_),
                 .g = view_of(g_),
                 .beta = view_of(beta_),
                 .group = group_,
                 .key_dim = static_cast<int>(problem_.key_dim()),
                 .value_dim = static_cast<int>(problem_.value_dim()),
                 .scale = static_cast<float>(problem_.scale),
                 .use_qk_l2norm = problem_.use_qk_l2norm};
        workspace_bytes_ = kernels_.workspace_bytes(view_);
        index_checkpoints();
    }

    [[nodiscard]] const std::vector<bool>* independent() const override {
        return &windows().independent;
    }

    [[nodiscard]] GdnSummary summary() override {
        const std::int64_t dim = problem_.key_dim();
        GdnSummary result{.S = zero_states(problem_.value_dim()), .M = zero_states(dim)};
        const ChunkWindows& chunks = windows();
        run_tasks(columns_of_task(), [&](GdnTask task, std::int64_t segment, void* workspace) {
            const std::size_t first_head = head_index(segment, task.key_head);
            task.end = states_at(result.S, segment, task.key_head);
            std::array<bool, kLargestGroup> has_map{};
            for (std::size_t i = 0; i < static_cast<std::size_t>(group_); ++i) {
                // M does not depend on V: one of the tasks that share a head makes it.
                has_map.at(i) = task.column_begin == 0 && !chunks.independent[first_head + i];
            }
            const GdnSummaryTask summary{.task = task,
                                         .map = states_at(result.M, segment, task.key_head),
                                         .map_stride = dim * dim,
                                         .first_chunks = chunks.first_chunk.data() + first_head,
                                         .has_map = has_map.data()};
            kernels_.summary(view_, summary, workspace);
        });
        return result;
    }

    [[nodiscard]] GdnOutput forward(const at::Tensor& S_start) override {
        check_optional_shape(S_start, "S_start", state_shape());
        S_start_ = S_start.defined() ? S_start.detach().to(at::kFloat).contiguous() : S_start;
        GdnOutput result{.o = at::empty(problem_.inputs.v.sizes(), v_.options()),
                         .S_end = zero_states(problem_.value_dim())};
        clear_padding(result.o);
        checkpoints_ = at::empty(
            {num_checkpoints_, problem_.value_heads(), problem_.key_dim(), problem_.value_dim()},
            g_.options());
        new_values_ =
            at::empty({problem_.value_heads(), v_.size(0), problem_.value_dim()}, g_.options())
                .transpose(0, 1);
        key_records_ = at::empty({problem_.key_heads(), num_chunks_, kernels_.key_record_floats},
                                 g_.options());
        run_tasks(columns_of_task(), [&](GdnTask task, std::int64_t segment, void* workspace) {
            task.start = states_at(S_start_, segment, task.key_head);
            task.end = states_at(result.S_end, segment, task.key_head);
            if (task.column_begin == 0) {  // of the tasks that share a head, one keeps them
                task.key_records = key_records_at(segment, task.key_head, 0);
            }
            const GdnForwardTask forward{
                .task = task,
                .o = view_of(result.o),
                .new_values = view_of(new_values_),
                .checkpoints = checkpoint_at(checkpoints_, segment, task.key_head),
                .checkpoint_stride = checkpoints_.stride(0)};
            kernels_.forward(view_, forward, workspace);
        });
        return result;
    }

    /// Backward computes all but the states at checkpoints again anyway.
    void release_intermediates() override {}

    [[nodiscard]] at::Tensor gradient_summary(const at::Tensor& d_o) override {
        check_optional_shape(d_o, "d_o", problem_.inputs.v.sizes());
        at::Tensor dS = zero_states(problem_.value_dim());
        if (!d_o.defined()) {
            return dS;
        }
        const at::Tensor d_o_rows = with_dense_rows(d_o.to(v_.scalar_type()));
        const ChunkWindows& chunks = windows();
        run_tasks(columns_of_task(), [&](GdnTask task, std::int64_t segment, void* workspace) {
            task.end = states_at(dS, segment, task.key_head);
            const GdnStateGradientTask gradient{
                .task = task,
                .d_o = view_of(d_o_rows),
                .chunk_counts = chunks.prefix_count.data() + head_index(segment, task.key_head)};
            kernels_.state_gradient(view_, gradient, workspace);
        });
        return dS;
    }

    [[nodiscard]] GdnGradients backward(const at::Tensor& d_o, const at::Tensor& dS_end) override {
        check_optional_shape(d_o, "d_o", problem_.inputs.v.sizes());
        check_optional_shape(dS_end, "dS_end", state_shape());
        HCP_CHECK(checkpoints_.defined(), "gdn: backward needs forward first");
        GdnGradients result{.dq = at::empty(q_.sizes(), q_.options()),
                            .dk = at::empty(k_.sizes(), k_.options()),
                            .dv = at::empty(v_.sizes(), v_.options()),
                            .dg = at::empty(g_.sizes(), g_.options()),
                            .dbeta = at::empty(g_.sizes(), g_.options()),
                            .dS_start = zero_states(problem_.value_dim())};
        for (const at::Tensor* tensor :
             {&result.dq, &result.dk, &result.dv, &result.dg, &result.dbeta}) {
            clear_padding(*tensor);
        }
        const Upstream upstream{
            .d_o = d_o.defined() ? with_dense_rows(d_o.to(v_.scalar_type())) : d_o,
            .dS_end = dS_end.defined() ? dS_end.to(at::kFloat).contiguous() : dS_end};
        if (num_checkpoints_ > 0 && few_tasks()) {
            backward_in_blocks(upstream, result);
        } else {
            backward_whole(upstream, result);
        }
        result.dg = result.dg.to(problem_.inputs.g.scalar_type());
        result.dbeta = result.dbeta.to(problem_.inputs.beta.scalar_type());
        return result;
    }

  private:
    struct Upstream {
        at::Tensor d_o, dS_end;  // undefined for zeros
    };

    [[nodiscard]] std::int64_t num_tasks() const {
        return problem_.num_segments() * problem_.key_heads();
    }
    /// Whether segments and key heads alone would leave threads without work. What is done then
    /// gives the same bits: it may depend on the threads.
    [[nodiscard]] bool few_tasks() const {
        const std::int64_t threads = max_threads();
        const std::int64_t rounds = (num_tasks() + threads - 1) / threads;
        return num_tasks() * 8 < rounds * threads * 7;
    }
    [[nodiscard]] int columns_of_task() const {
        constexpr int kLeast = 32;
        if (!few_tasks() || num_tasks() == 0) {
            return view_.value_dim;
        }
        const auto parts = static_cast<int>(2 * max_threads() / num_tasks());
        const int columns = (view_.value_dim + std::max(parts, 1) - 1) / std::max(parts, 1);
        return std::max((columns + kLeast - 1) / kLeast * kLeast, kLeast * 2);
    }

    /// body(task, segment, workspace) for every segment, key head and range of `columns` of V.
    template <typename Body>
    void run_tasks(int columns, Body body) const {
        const std::int64_t key_heads = problem_.key_heads();
        const std::int64_t parts = (view_.value_dim + columns - 1) / columns;
        parallel_tasks(num_tasks() * parts, [&](std::int64_t task, int) {
            const std::int64_t segment = task / parts / key_heads;
            const auto at = static_cast<std::size_t>(segment);
            const int begin = static_cast<int>(task % parts) * columns;
            const GdnTask range{.key_head = task / parts % key_heads,
                                .token_begin = problem_.offsets[at],
                                .token_end = problem_.offsets[at + 1],
                                .column_begin = begin,
                                .column_end = std::min(begin + columns, view_.value_dim),
                                .state_stride = problem_.key_dim() * problem_.value_dim()};
            body(range, segment, thread_workspace(workspace_bytes_));
        });
    }

    [[nodiscard]] GdnBackwardTask backward_task(const GdnTask& task,
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

    void backward_whole(const Upstream& upstream, GdnGradients& result) const {
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

    /// The gradient of the state first, split by columns; then all else, split in time at its
    /// checkpoints.
    void backward_in_blocks(const Upstream& upstream, GdnGradients& result) const {
        const at::Tensor gradients = at::empty_like(checkpoints_);
        run_tasks(columns_of_task(), [&](GdnTask task, std::int64_t segment, void* workspace) {
            task.end = states_at(result.dS_start, segment, task.key_head);
            use_key_records(task, segment, 0);
            const GdnStateGradientTask gradient{
                .task = task,
                .d_o = upstream.d_o.defined() ? view_of(upstream.d_o) : GdnView{},
                .d_end = states_at(upstream.dS_end, segment, task.key_head),
                .checkpoints = checkpoint_at(gradients, segment, task.key_head),
                .checkpoint_stride = gradients.stride(0)};
            kernels_.state_gradient(view_, gradient, workspace);
        });
        const std::int64_t key_heads = problem_.key_heads();
        const std::int64_t blocks = num_checkpoints_ + problem_.num_segments();
        parallel_tasks(blocks * key_heads, [&](std::int64_t index, int) {
            const std::int64_t key_head = index % key_heads;
            const auto [segment, block] = block_at(index / key_heads);
            const auto at = static_cast<std::size_t>(segment);
            const std::int64_t end = problem_.offsets[at + 1];
            GdnTask task{.key_head = key_head,
                         .column_end = view_.value_dim,
                         .state_stride = problem_.key_dim() * problem_.value_dim()};
            task.token_begin = problem_.offsets[at] + block * kernels_.checkpoint_tokens;
            task.token_end = std::min(task.token_begin + kernels_.checkpoint_tokens, end);
            const auto boundary = [&](const at::Tensor& states, std::int64_t number) {
                return checkpoint_at(states, segment, key_head) + number * states.stride(0);
            };
            task.start = block == 0 ? states_at(S_start_, segment, key_head)
                                    : boundary(checkpoints_, block - 1);
            use_key_records(task, segment, block);
            GdnBackwardTask backward = backward_task(task, upstream, result);
            backward.d_end = task.token_end == end ? states_at(upstream.dS_end, segment, key_head)
                                                   : boundary(gradients, block);
            kernels_.backward(view_, backward, thread_workspace(workspace_bytes_));
        });
    }

    struct Block {
        std::int64_t segment, block;
    };
    /// Of all segments' blocks between checkpoints, one after the other.
    [[nodiscard]] Block block_at(std::int64_t index) const {
        // Segment i has first_checkpoint_[i] checkpoints and i segments before it.
        std::int64_t low = 0, high = problem_.num_segments();
        while (high - low > 1) {
            const std::int64_t middle = (low + high) / 2;
            const bool before =
                first_checkpoint_[static_cast<std::size_t>(middle)] + middle <= index;
            (before ? low : high) = middle;
        }
        return {low, index - low - first_checkpoint_[static_cast<std::size_t>(low)]};
    }

    /// Made on first use.
    [[nodiscard]] const ChunkWindows& windows() const {
        if (!windows_) {
            // The bound on what a chunk adds holds for keys of unit length.
            const double floor = problem_.use_qk_l2norm ? problem_.summary_floor
                                                        : -std::numeric_limits<double>::infinity();
            windows_ = make_chunk_windows(g_, problem_.offsets, kernels_.chunk_tokens, floor);
        }
        return *windows_;
    }
    [[nodiscard]] std::size_t head_index(std::int64_t segment, std::int64_t key_head) const {
        return static_cast<std::size_t>(segment * problem_.value_heads() + key_head * group_);
    }

    [[nodiscard]] std::vector<std::int64_t> state_shape() const {
        return {problem_.num_segments(), problem_.value_heads(), problem_.key_dim(),
                problem_.value_dim()};
    }
    [[nodiscard]] at::Tensor zero_states(std::int64_t columns) const {
        return at::zeros(
            {problem_.num_segments(), problem_.value_heads(), problem_.key_dim(), columns},
            g_.options());
    }
    /// The states of a key head's value heads; null for an undefined tensor.
    [[nodiscard]] float* states_at(const at::Tensor& states,
                                   std::int64_t segment,
                                   std::int64_t key_head) const {
        return states.defined() ? states.data_ptr<float>() + segment * states.stride(0) +
                                      key_head * group_ * states.stride(1)
                                : nullptr;
    }
    /// The first of a segment's states at checkpoints.
    [[nodiscard]] float* checkpoint_at(const at::Tensor& states,
                                       std::int64_t segment,
                                       std::int64_t key_head) const {
        return states.data_ptr<float>() +
               first_checkpoint_[static_cast<std::size_t>(segment)] * states.stride(0) +
               key_head * group_ * states.stride(1);
    }
    /// From the chunk on that starts block `block` of a segment.
    [[nodiscard]] float* key_records_at(std::int64_t segment,
                                        std::int64_t key_head,
                                        std::int64_t block) const {
        const std::int64_t chunk = first_chunk_[static_cast<std::size_t>(segment)] +
                                   block * (kernels_.checkpoint_tokens / kernels_.chunk_tokens);
        return key_records_.data_ptr<float>() + key_head * key_records_.stride(0) +
               chunk * kernels_.key_record_floats;
    }
    void use_key_records(GdnTask& task, std::int64_t segment, std::int64_t block) const {
        task.key_records = key_records_at(segment, task.key_head, block);
        task.key_records_made = true;
    }
    void clear_padding(const at::Tensor& x) const {
        const std::int64_t begin = problem_.offsets.back();
        if (begin < x.size(0)) {
            x.narrow(0, begin, x.size(0) - begin).zero_();
        }
    }
    void index_checkpoints() {
        for (std::int64_t i = 0; i < problem_.num_segments(); ++i) {
            const auto at = static_cast<std::size_t>(i);
            const std::int64_t tokens = problem_.offsets[at + 1] - problem_.offsets[at];
            first_checkpoint_.push_back(num_checkpoints_);
            first_chunk_.push_back(num_chunks_);
            num_chunks_ += (tokens + kernels_.chunk_tokens - 1) / kernels_.chunk_tokens;
            num_checkpoints_ +=
                std::max<std::int64_t>((tokens - 1) / kernels_.checkpoint_tokens, 0);
        }
    }

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

}  // namespace

std::shared_ptr<GdnCall> make_fused_call(Problem problem) {
    return make_fused_call(std::move(problem), gdn_kernels(selected_isa()));
}

std::shared_ptr<GdnCall> make_fused_call(Problem problem, const GdnKernelSet& kernels) {
    check_support(problem);
    return std::make_shared<FusedCall>(std::move(problem), kernels);
}

}  // namespace hybridcp::gdn
