// The fused backend on the CPU: tensors to pointers, tasks to threads. What is computed is in
// fused_kernels.cpp, once per instruction set.

#include <fmt/format.h>

#include <limits>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "hybridcp/error.h"
#include "kernels/gdn/fused/fused_call.h"
#include "kernels/gdn/fused_chunk.h"

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

}  // namespace

void* thread_workspace(std::int64_t bytes) {
    thread_local std::vector<std::byte> memory;
    constexpr std::int64_t kAlignment = 64;
    if (static_cast<std::int64_t>(memory.size()) < bytes + kAlignment) {
        memory.resize(static_cast<std::size_t>(bytes + kAlignment));
    }
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    return memory.data() + (kAlignment - address % kAlignment) % kAlignment;
}

FusedCall::FusedCall(Problem problem, const GdnKernelSet& kernels)
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

GdnSummary FusedCall::summary() {
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

GdnOutput FusedCall::forward(const at::Tensor& S_start) {
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
    key_records_ =
        at::empty({problem_.key_heads(), num_chunks_, kernels_.key_record_floats}, g_.options());
    use_huge_pages({result.o, checkpoints_, new_values_, key_records_});
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

at::Tensor FusedCall::gradient_summary(const at::Tensor& d_o) {
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

const ChunkWindows& FusedCall::windows() const {
    if (!windows_) {
        // The bound on what a chunk adds holds for keys of unit length.
        const double floor = problem_.use_qk_l2norm ? problem_.summary_floor
                                                    : -std::numeric_limits<double>::infinity();
        windows_ = make_chunk_windows(g_, problem_.offsets, kernels_.chunk_tokens, floor);
    }
    return *windows_;
}

void FusedCall::use_huge_pages(std::initializer_list<at::Tensor> tensors) const {
#if defined(__linux__)
    constexpr std::uintptr_t kPage = std::uintptr_t{2} << 20;
    for (const at::Tensor& x : tensors) {
        const auto begin = reinterpret_cast<std::uintptr_t>(x.data_ptr());
        const std::uintptr_t first = (begin + kPage - 1) / kPage * kPage;
        const std::uintptr_t last = (begin + x.nbytes()) / kPage * kPage;
        if (kernels_.prefers_huge_pages && first < last) {  // a wish, which may be refused
            (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
        }
    }
#endif
}

void FusedCall::clear_padding(const at::Tensor& x) const {
    const std::int64_t begin = problem_.offsets.back();
    if (begin < x.size(0)) {
        x.narrow(0, begin, x.size(0) - begin).zero_();
    }
}

void FusedCall::index_checkpoints() {
    for (std::int64_t i = 0; i < problem_.num_segments(); ++i) {
        const auto at = static_cast<std::size_t>(i);
        const std::int64_t tokens = problem_.offsets[at + 1] - problem_.offsets[at];
        first_checkpoint_.push_back(num_checkpoints_);
        first_chunk_.push_back(num_chunks_);
        num_chunks_ += (tokens + kernels_.chunk_tokens - 1) / kernels_.chunk_tokens;
        num_checkpoints_ += std::max<std::int64_t>((tokens - 1) / kernels_.checkpoint_tokens, 0);
    }
}

bool FusedCall::few_tasks() const {
    const std::int64_t threads = max_threads();
    const std::int64_t rounds = (num_tasks() + threads - 1) / threads;
    return num_tasks() * 8 < rounds * threads * 7;
}

int FusedCall::columns_of_task() const {
    if (!few_tasks() || num_tasks() == 0) {
        return view_.value_dim;
    }
    return rounded_columns(2 * max_threads() / num_tasks());
}

int FusedCall::columns_of_walk() const {
    return rounded_columns(max_threads() / (2 * num_tasks()));
}

int FusedCall::rounded_columns(std::int64_t parts) const {
    constexpr int kLeast = 32;
    const int count = static_cast<int>(std::max<std::int64_t>(parts, 1));
    const int columns = (view_.value_dim + count - 1) / count;
    return std::max((columns + kLeast - 1) / kLeast * kLeast, kLeast * 2);
}

FusedCall::SegmentTask FusedCall::task_at(std::int64_t index, int columns) const {
    const std::int64_t parts = parts_of(columns), key_heads = problem_.key_heads();
    const std::int64_t segment = index / parts / key_heads;
    const auto at = static_cast<std::size_t>(segment);
    const int begin = static_cast<int>(index % parts) * columns;
    return {.task = {.key_head = index / parts % key_heads,
                     .token_begin = problem_.offsets[at],
                     .token_end = problem_.offsets[at + 1],
                     .column_begin = begin,
                     .column_end = std::min(begin + columns, view_.value_dim),
                     .state_stride = problem_.key_dim() * problem_.value_dim()},
            .segment = segment};
}

std::int64_t FusedCall::num_blocks(std::int64_t segment) const {
    const auto at = static_cast<std::size_t>(segment);
    const std::int64_t tokens = problem_.offsets[at + 1] - problem_.offsets[at];
    return (tokens + kernels_.checkpoint_tokens - 1) / kernels_.checkpoint_tokens;
}

std::vector<std::int64_t> FusedCall::state_shape() const {
    return {problem_.num_segments(), problem_.value_heads(), problem_.key_dim(),
            problem_.value_dim()};
}

at::Tensor FusedCall::zero_states(std::int64_t columns) const {
    return at::zeros({problem_.num_segments(), problem_.value_heads(), problem_.key_dim(), columns},
                     g_.options());
}

float* FusedCall::states_at(const at::Tensor& states,
                            std::int64_t segment,
                            std::int64_t key_head) const {
    return states.defined() ? states.data_ptr<float>() + segment * states.stride(0) +
                                  key_head * group_ * states.stride(1)
                            : nullptr;
}

float* FusedCall::checkpoint_at(const at::Tensor& states,
                                std::int64_t segment,
                                std::int64_t key_head) const {
    return states.data_ptr<float>() +
           first_checkpoint_[static_cast<std::size_t>(segment)] * states.stride(0) +
           key_head * group_ * states.stride(1);
}

float* FusedCall::key_records_at(std::int64_t segment,
                                 std::int64_t key_head,
                                 std::int64_t block) const {
    const std::int64_t chunk =
        first_chunk_[static_cast<std::size_t>(segment)] + block * chunks_of_block();
    return key_records_.data_ptr<float>() + key_head * key_records_.stride(0) +
           chunk * kernels_.key_record_floats;
}

void FusedCall::use_key_records(GdnTask& task, std::int64_t segment, std::int64_t block) const {
    task.key_records = key_records_at(segment, task.key_head, block);
    task.key_records_made = true;
}

std::shared_ptr<GdnCall> make_fused_call(Problem problem) {
    return make_fused_call(std::move(problem), gdn_kernels(selected_isa()));
}

std::shared_ptr<GdnCall> make_fused_call(Problem problem, const GdnKernelSet& kernels) {
    check_support(problem);
    return std::make_shared<FusedCall>(std::move(problem), kernels);
}

}  // namespace hybridcp::gdn

namespace hybridcp {

std::int64_t fused_gdn_chunk(bool is_fp32) {
    const GdnKernelSet& kernels = gdn_kernels(selected_isa());
    return (is_fp32 ? kernels.fp32 : kernels.bf16).chunk_tokens;
}

}  // namespace hybridcp
