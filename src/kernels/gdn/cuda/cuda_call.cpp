// The fused backend on Hopper GPUs: tensors to views, segments to tables. What is computed is in
// the kernels (docs/gdn-cuda.md).

#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "hybridcp/error.h"
#include "kernels/gdn/backends.h"
#include "kernels/gdn/cuda/images.h"
#include "kernels/gdn/cuda/launch.h"
#include "kernels/gdn/cuda/rows.h"
#include "kernels/gdn/cuda/segment_tables.h"
#include "kernels/gdn/cuda/support.h"

namespace hybridcp::gdn {
namespace {

using cuda::RowsView;

void check_launch(const char* error, const char* kernel) {
    HCP_CHECK(error == nullptr, "gdn: {} on cuda: {}", kernel, error);
}

std::int64_t longest_segment(const GdnSegments& segments) {
    std::int64_t longest = 0;
    for (std::size_t i = 0; i + 1 < segments.offsets().size(); ++i) {
        longest = std::max(longest, segments.offsets()[i + 1] - segments.offsets()[i]);
    }
    return longest;
}

float* floats_of(const at::Tensor& x) {
    return x.defined() ? x.data_ptr<float>() : nullptr;
}

class CudaCall final : public GdnCall {
  public:
    CudaCall(Problem problem, const CudaLimits& limits)
        : problem_(std::move(problem)),
          kernels_(longest_segment(problem_.segments) <= limits.fp16_tokens
                       ? cuda::fp16::launches()
                       : cuda::bf16::launches()),
          fp16_(&kernels_ == &cuda::fp16::launches()),
          q_(with_adjoining_heads(with_whole_rows(problem_.inputs.q))),
          k_(with_adjoining_heads(with_whole_rows(problem_.inputs.k))),
          v_(with_copyable_rows(with_whole_rows(problem_.inputs.v))),
          g_(problem_.inputs.g.to(at::kFloat)),
          beta_(problem_.inputs.beta.scalar_type() == at::kDouble
                    ? problem_.inputs.beta.to(at::kFloat)
                    : problem_.inputs.beta),
          tables_(segment_tables(problem_.segments,
                                 v_.device(),
                                 problem_.value_heads(),
                                 limits.chunks_of_two_summary_parts)) {
        call_ = {.q = rows_of(q_),
                 .k = rows_of(k_),
                 .v = rows_of(v_),
                 .gates = {.g = floats_of(g_),
                           .g_token_stride = g_.stride(0),
                           .g_head_stride = g_.stride(1),
                           .beta = beta_.data_ptr(),
                           .beta_token_stride = beta_.stride(0),
                           .beta_head_stride = beta_.stride(1),
                           .beta_is_bf16 = beta_.scalar_type() == at::kBFloat16},
                 .shape = {.tokens = static_cast<std::int32_t>(problem_.num_tokens()),
                           .key_heads = static_cast<std::int32_t>(problem_.key_heads()),
                           .value_heads = static_cast<std::int32_t>(problem_.value_heads()),
                           .num_chunks = tables_->num_chunks,
                           .scale = static_cast<float>(problem_.scale),
                           .use_qk_l2norm = problem_.use_qk_l2norm},
                 .chunks = tables_->chunks(),
                 .pieces = tables_->pieces(),
                 .num_pieces = tables_->num_pieces,
                 .may_truncate = problem_.use_qk_l2norm,
                 .stream = nullptr,
                 .largest = nullptr};
        const std::int64_t parts = choose_parts(limits);
        heads_of_part_ = std::max<std::int64_t>(
            1, (problem_.key_heads() + parts - 1) / std::max<std::int64_t>(parts, 1));
        // Fewer heads at once: more pieces of a segment.
        part_tables_ =
            segment_tables(problem_.segments, v_.device(), heads_of_part_ * group(),
                           limits.chunks_of_two_summary_parts, keeps_ ? problem_.kept_share : 0.0);
        keeps_ = part_tables_->cut.kept > 0;
    }

    /// The gates are on the device: telling would wait for it.
    [[nodiscard]] const std::vector<bool>* independent() const override { return nullptr; }

    [[nodiscard]] GdnSummary summary() override {
        const std::int64_t segments = problem_.num_segments();
        const at::Tensor S = new_states(tables_->num_slots), M = new_states(tables_->num_slots);
        const at::Tensor largest = largest_of(v_, at::Tensor());
        cuda::CallView call = summary_parts(on_stream());
        call.largest = bits_from(largest, 0);
        for (const std::int64_t segment : tables_->empty_segments) {
            S[segment].zero_();
            M[segment].copy_(at::eye(cuda::kHeadDim, g_.options()));
        }
        check_launch(kernels_.summary(
                         call, {.S = floats_of(S), .M = floats_of(M), .floor = summary_floor()}),
                     "summary");
        check_launch(kernels_.join(call, {.joins = tables_->joins(),
                                          .num_joins = tables_->num_joins,
                                          .transitions = floats_of(M),
                                          .states = floats_of(S),
                                          .products = floats_of(M),
                                          .backwards = false}),
                     "summary of parts");
        if (tables_->num_joins > 0) {
            transitions_ = M;
        }
        return {.S = narrowed(S.narrow(0, 0, segments), problem_.value_dim()),
                .M = narrowed(M.narrow(0, 0, segments), problem_.key_dim())};
    }

    [[nodiscard]] GdnOutput forward(const at::Tensor& S_start) override {
        check_optional_shape(S_start, "S_start", state_shape());
        S_start_ = with_whole_states(S_start.defined() ? S_start.detach() : S_start);
        GdnOutput result{
            .o = at::empty(v_.sizes(), v_.options().memory_format(at::MemoryFormat::Contiguous)),
            .S_end = new_states()};
        clear_padding(result.o);
        copy_empty_segments(result.S_end, S_start_);
        norms_ = at::empty({2, problem_.key_heads(), problem_.num_tokens()}, g_.options());
        largest_values_ = largest_of(v_, S_start_);
        checkpoints_ = at::empty({problem_.value_heads(), part_tables_->num_checkpoints,
                                  std::int64_t{cuda::kCheckpointFloats}},
                                 g_.options());
        release_intermediates();
        if (keeps_) {
            images_ = new_images(all_heads(), true);
            complete_ = part_tables_->cut.kept == part_tables_->cut.length;
        }
        check_launch(kernels_.forward(on_stream(), {.o = rows_of(result.o),
                                                    .start = floats_of(S_start_),
                                                    .end = floats_of(result.S_end),
                                                    .q_norms = floats_of(norms_[0]),
                                                    .k_norms = floats_of(norms_[1]),
                                                    .checkpoints = checkpoints_from(all_heads()),
                                                    .images = keeps_ ? images_.view(all_heads())
                                                                     : cuda::ForwardImages{}}),
                     "forward");
        result.o = narrowed_rows(result.o, problem_.value_dim());
        result.S_end = narrowed(result.S_end, problem_.value_dim());
        return result;
    }

    void release_intermediates() override {
        images_ = ForwardImages();
        complete_ = false;
    }

    [[nodiscard]] at::Tensor gradient_summary(const at::Tensor& d_o) override {
        check_optional_shape(d_o, "d_o", problem_.inputs.v.sizes());
        const std::int64_t segments = problem_.num_segments();
        const bool in_parts = transitions_.defined();
        const at::Tensor dS = new_states(in_parts ? transitions_.size(0) : segments).zero_();
        if (d_o.defined()) {
            const at::Tensor d_o_rows = rows_of_gradient(d_o);
            const at::Tensor largest = largest_of(d_o_rows, at::Tensor());
            for_each_part([&](const Part& part) {
                const ForwardImages images = images_of(part);
                cuda::StateGradientView view = state_gradient_view(part, images, d_o_rows, largest);
                view.d_start = states_of(dS, part);
                view.summary_floor = summary_floor();
                const cuda::CallView call = on_stream(part);
                check_launch(kernels_.state_gradient(
                                 in_parts ? summary_parts(call) : whole_segments(call), view),
                             "gradient_summary");
            });
        }
        if (in_parts && d_o.defined()) {
            check_launch(kernels_.join(on_stream(), {.joins = tables_->joins(),
                                                     .num_joins = tables_->num_joins,
                                                     .transitions = floats_of(transitions_),
                                                     .states = floats_of(dS),
                                                     .products = nullptr,
                                                     .backwards = true}),
                         "gradient summary of parts");
        }
        return narrowed(dS.narrow(0, 0, segments), problem_.value_dim());
    }

    [[nodiscard]] GdnGradients backward(const at::Tensor& d_o, const at::Tensor& dS_end) override {
        check_optional_shape(d_o, "d_o", problem_.inputs.v.sizes());
        check_optional_shape(dS_end, "dS_end", state_shape());
        const at::Tensor d_end = with_whole_states(dS_end);
        const at::Tensor d_o_rows =
            d_o.defined() ? rows_of_gradient(d_o) : at::zeros(v_.sizes(), v_.options());
        GdnGradients result = new_gradients();
        copy_empty_segments(result.dS_start, d_end);
        const at::Tensor largest = largest_of(d_o_rows, d_end);
        for_each_part(
            [&](const Part& part) { backward_of(part, d_o_rows, d_end, largest, result); });
        clear_padding(images_.dq);
        clear_padding(images_.dk);
        result.dq = narrowed_rows(images_.dq, problem_.key_dim());
        result.dk = narrowed_rows(images_.dk, problem_.key_dim());
        release_intermediates();
        result.dv = narrowed_rows(result.dv, problem_.value_dim());
        result.dS_start = narrowed(result.dS_start, problem_.value_dim());
        result.dg = result.dg.to(problem_.inputs.g.scalar_type());
        result.dbeta = result.dbeta.to(problem_.inputs.beta.scalar_type());
        return result;
    }

  private:
    using Part = HeadPart;
    template <typename Body>
    void for_each_part(Body body) const {
        for (std::int64_t first = 0; first < problem_.key_heads(); first += heads_of_part_) {
            const std::int64_t heads = std::min(heads_of_part_, problem_.key_heads() - first);
            body(Part{first, heads, first * group(), heads * group()});
        }
    }
    [[nodiscard]] std::int64_t group() const {
        return problem_.value_heads() / std::max<std::int64_t>(problem_.key_heads(), 1);
    }
    [[nodiscard]] bool is_whole(const Part& part) const {
        return part.key_heads == problem_.key_heads();
    }

    [[nodiscard]] cuda::CallView on_stream() const {
        cuda::CallView call = call_;
        call.stream = cuda::current_stream(v_.device().index());
        call.largest = bits_from(largest_values_, 0);
        return call;
    }
    [[nodiscard]] cuda::CallView on_stream(const Part& part) const {
        cuda::CallView call = on_stream();
        call.largest = bits_from(largest_values_, part.first_value_head);
        call.chunks = part_tables_->chunks();
        call.pieces = part_tables_->pieces();
        call.num_pieces = part_tables_->num_pieces;
        call.q = from_head(q_, part.first_key_head);
        call.k = from_head(k_, part.first_key_head);
        call.v = from_head(v_, part.first_value_head);
        call.gates.g += part.first_value_head * g_.stride(1);
        call.gates.beta = static_cast<const char*>(call.gates.beta) +
                          part.first_value_head * beta_.stride(1) * beta_.element_size();
        call.shape.key_heads = static_cast<std::int32_t>(part.key_heads);
        call.shape.value_heads = static_cast<std::int32_t>(part.value_heads);
        call.shape.key_heads_in_memory = static_cast<std::int32_t>(problem_.key_heads());
        call.shape.value_heads_in_memory = static_cast<std::int32_t>(problem_.value_heads());
        return call;
    }
    /// One piece a segment.
    [[nodiscard]] cuda::CallView whole_segments(cuda::CallView call) const {
        call.pieces = tables_->whole_segments();
        call.num_pieces = tables_->num_whole_segments;
        return call;
    }
    [[nodiscard]] cuda::CallView summary_parts(cuda::CallView call) const {
        call.pieces = tables_->summary_parts();
        call.num_pieces = tables_->num_summary_parts;
        return call;
    }
    [[nodiscard]] static float* states_of(const at::Tensor& states, const Part& part) {
        constexpr std::int64_t kElements = std::int64_t{cuda::kHeadDim} * cuda::kHeadDim;
        return states.defined() ? states.data_ptr<float>() + part.first_value_head * kElements
                                : nullptr;
    }
    /// The bound on what a chunk adds holds for keys of unit length.
    [[nodiscard]] float summary_floor() const {
        return problem_.use_qk_l2norm ? static_cast<float>(problem_.summary_floor)
                                      : -std::numeric_limits<float>::infinity();
    }

    [[nodiscard]] Part all_heads() const {
        return {0, problem_.key_heads(), 0, problem_.value_heads()};
    }
    /// Whether forward keeps its images, and in how many parts backward takes the heads.
    [[nodiscard]] std::int64_t choose_parts(const CudaLimits& limits) {
        const std::int64_t kept = ForwardImages::bytes(all_heads(), tables_->num_chunks);
        keeps_ =
            problem_.keep_intermediates && problem_.kept_share > 0 && kept <= limits.kept_bytes;
        const std::int64_t bytes =
            problem_.value_heads() * tables_->num_chunks * std::int64_t{cuda::kStateBytes} +
            (keeps_ ? 0 : kept);
        const std::int64_t most = keeps_ ? limits.kept_image_bytes : limits.image_bytes;
        return (bytes + most - 1) / most;
    }
    [[nodiscard]] ForwardImages new_images(const Part& part, bool with_marks) const {
        const bool has_rows = images_.dq.defined();
        return ForwardImages::make(part, tables_->num_chunks, has_rows ? images_.dq : new_rows(q_),
                                   has_rows ? images_.dk : new_rows(k_), with_marks);
    }
    [[nodiscard]] static at::Tensor new_rows(const at::Tensor& like) {
        return at::empty(like.sizes(), like.options().memory_format(at::MemoryFormat::Contiguous));
    }

    /// What forward kept, and the rest made again; then there for the next method if it is that of
    /// all heads.
    [[nodiscard]] ForwardImages images_of(const Part& part) {
        HCP_CHECK(norms_.defined(), "gdn: gradients need forward first");
        const ForwardImages images = images_.defined() ? images_.of(part) : new_images(part, false);
        if (complete_) {
            return images;
        }
        check_launch(kernels_.remake(on_stream(part), {.runs = part_tables_->runs(),
                                                       .num_runs = part_tables_->num_runs,
                                                       .start = states_of(S_start_, part),
                                                       .checkpoints = checkpoints_from(part),
                                                       .images = images.view(part)}),
                     "forward again");
        if (is_whole(part)) {
            images_ = images;
            complete_ = true;
        } else {  // the next part's go to the same dq and dk
            images_.dq = images.dq;
            images_.dk = images.dk;
        }
        return images;
    }
    [[nodiscard]] cuda::Checkpoints checkpoints_from(const Part& part) const {
        return {.cut = part_tables_->cut,
                .first = part_tables_->first_checkpoints(),
                .data = floats_of(checkpoints_) + part.first_value_head *
                                                      part_tables_->num_checkpoints *
                                                      cuda::kCheckpointFloats,
                .of_head = part_tables_->num_checkpoints,
                .first_key_head = static_cast<std::int32_t>(part.first_key_head)};
    }
    [[nodiscard]] cuda::StateGradientView state_gradient_view(const Part& part,
                                                              const ForwardImages& images,
                                                              const at::Tensor& d_o,
                                                              const at::Tensor& largest) const {
        cuda::StateGradientView view{};
        view.d_o = from_head(d_o, part.first_value_head);
        view.q_norms = floats_of(norms_[0][part.first_key_head]);
        view.k_norms = floats_of(norms_[1][part.first_key_head]);
        view.inverses = bytes_of(images.inverses);
        view.largest = bits_from(largest, part.first_value_head);
        return view;
    }
    /// For operands in fp16: the largest magnitude of each value head, as bits of fp32.
    [[nodiscard]] at::Tensor largest_of(const at::Tensor& rows, const at::Tensor& states) const {
        if (!fp16_) {
            return {};
        }
        at::Tensor largest = at::zeros({problem_.value_heads()}, g_.options().dtype(at::kInt));
        check_launch(kernels_.magnitudes(on_stream(), {.rows = rows_of(rows),
                                                       .states = floats_of(states),
                                                       .largest = bits_from(largest, 0)}),
                     "magnitudes");
        return largest;
    }
    [[nodiscard]] static std::uint32_t* bits_from(const at::Tensor& largest, std::int64_t head) {
        return largest.defined()
                   ? reinterpret_cast<std::uint32_t*>(largest.data_ptr<std::int32_t>()) + head
                   : nullptr;
    }
    [[nodiscard]] static at::Tensor rows_of_gradient(const at::Tensor& d_o) {
        return with_adjoining_heads(with_whole_rows(d_o.to(at::kBFloat16)));
    }

    void backward_of(const Part& part,
                     const at::Tensor& d_o,
                     const at::Tensor& d_end,
                     const at::Tensor& largest,
                     const GdnGradients& result) {
        const ForwardImages images = images_of(part);
        const at::Tensor d_states = new_image(part, tables_->num_chunks, cuda::kStateBytes, q_);
        const at::Tensor progress =
            at::empty({1 + part.value_heads * tables_->num_chunks}, g_.options().dtype(at::kInt));
        auto* const counts = reinterpret_cast<std::uint32_t*>(progress.data_ptr<std::int32_t>());
        cuda::StateGradientView walk = state_gradient_view(part, images, d_o, largest);
        walk.d_end = states_of(d_end, part);
        walk.d_start = states_of(result.dS_start, part);
        walk.d_states = bytes_of(d_states);
        walk.d_new_values = from_head(result.dv, part.first_value_head);
        walk.progress = {.items = counts, .ready = counts + 1};
        check_launch(kernels_.state_gradient(on_stream(part), walk), "state gradient");
        const cuda::GradientsView view{.d_o = walk.d_o,
                                       .q_norms = walk.q_norms,
                                       .k_norms = walk.k_norms,
                                       .images = images.view(part),
                                       .d_states = walk.d_states,
                                       .progress = walk.progress,
                                       .largest_gradients = walk.largest,
                                       .dq = from_head(images.dq, part.first_key_head).data,
                                       .dk = from_head(images.dk, part.first_key_head).data,
                                       .dv = walk.d_new_values,
                                       .dg = floats_of(result.dg) + part.first_value_head,
                                       .dbeta = floats_of(result.dbeta) + part.first_value_head,
                                       .gate_token_stride = problem_.value_heads()};
        check_launch(kernels_.gradients(on_stream(part), view), "gradients");
    }

    /// dq and dk later.
    [[nodiscard]] GdnGradients new_gradients() const {
        GdnGradients result{.dq = {},
                            .dk = {},
                            .dv = new_rows(v_),
                            .dg = new_rows(g_),
                            .dbeta = at::empty(g_.sizes(), g_.options()),
                            .dS_start = new_states()};
        for (const at::Tensor* x : {&result.dv, &result.dg, &result.dbeta}) {
            clear_padding(*x);
        }
        return result;
    }
    [[nodiscard]] std::vector<std::int64_t> state_shape() const {
        return {problem_.num_segments(), problem_.value_heads(), problem_.key_dim(),
                problem_.value_dim()};
    }
    /// As the kernels have them, whatever the head dims.
    [[nodiscard]] at::Tensor new_states() const { return new_states(problem_.num_segments()); }
    [[nodiscard]] at::Tensor new_states(std::int64_t segments) const {
        return at::empty({segments, problem_.value_heads(), cuda::kHeadDim, cuda::kHeadDim},
                         g_.options());
    }
    [[nodiscard]] at::Tensor narrowed(const at::Tensor& states, std::int64_t columns) const {
        return states.narrow(2, 0, problem_.key_dim()).narrow(3, 0, columns).contiguous();
    }
    [[nodiscard]] static at::Tensor narrowed_rows(const at::Tensor& x, std::int64_t columns) {
        return x.narrow(2, 0, columns).contiguous();
    }
    /// A segment without tokens passes its state on.
    void copy_empty_segments(const at::Tensor& to, const at::Tensor& from) const {
        for (const std::int64_t segment : tables_->empty_segments) {
            if (from.defined()) {
                to[segment].copy_(from[segment]);
            } else {
                to[segment].zero_();
            }
        }
    }
    void clear_padding(const at::Tensor& x) const {
        const std::int64_t begin = problem_.offsets.back();
        if (begin < x.size(0)) {
            x.narrow(0, begin, x.size(0) - begin).zero_();
        }
    }

    Problem problem_;
    const cuda::Launches& kernels_;
    bool fp16_;
    at::Tensor q_, k_, v_, g_, beta_;
    std::shared_ptr<const SegmentTables> tables_, part_tables_;  // of all heads, of a part's
    cuda::CallView call_{};
    at::Tensor S_start_;
    at::Tensor norms_;           // [2, Hk, T]: r_q, r_k
    at::Tensor largest_values_;  // [Hv]: of v and S_start, for fp16
    at::Tensor checkpoints_;     // [Hv, checkpoints of a head, ...] (tables.h), for runs of a part
    at::Tensor transitions_;     // M of the parts that summaries are joined from
    ForwardImages images_;
    bool complete_ = false;  // images_ has all chunks of all heads
    bool keeps_ = false;     // forward leaves some of them
    std::int64_t heads_of_part_ = 0;
};

}  // namespace

std::shared_ptr<GdnCall> make_cuda_call(Problem problem, const CudaLimits& limits) {
    cuda::check_support(problem);
    return std::make_shared<CudaCall>(std::move(problem), limits);
}

}  // namespace hybridcp::gdn
