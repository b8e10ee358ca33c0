// The chunked backend in tensor operations on any device: see eager.h.
#include "kernels/gdn/eager.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "hybridcp/error.h"

namespace hybridcp::gdn {
namespace {

using at::Tensor;

class EagerCall final : public GdnCall {
  public:
    explicit EagerCall(Problem problem)
        : problem_(std::move(problem)),
          type_(problem_.inputs.q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat),
          chunks_(problem_.segments.chunks(
              problem_.num_tokens(), problem_.chunk_size, problem_.inputs.q.options())),
          layout_(*chunks_) {
        const c10::NoGradGuard no_grad;
        factors_ = make_chunk_factors(problem_, layout_, type_);
        if (has_windows()) {
            windows_ = SummaryWindows(layout_, factors_.log_decay, problem_.value_heads(),
                                      problem_.summary_floor);
        }
    }

    const std::vector<bool>* independent() const override {
        return has_windows() ? &windows_.independent_heads() : nullptr;
    }

    GdnSummary summary() override {
        const c10::NoGradGuard no_grad;
        restore_intermediates();
        const std::int64_t K = problem_.key_dim();
        if (!values_from_zero_.defined()) {
            values_from_zero_ = make_values_from_zero();
        }
        if (!windows_.forward_is_whole()) {
            return split_summary(summarize_windows(factors_, layout_, windows_, values_from_zero_));
        }
        // The same recurrence on K more columns that start at I and are written no values: they
        // become M.
        const Tensor zero = start_states(Tensor());
        const Tensor one = at::eye(K, zero.options()).expand({zero.size(0), K, K});
        const Tensor last =
            run_forward(factors_, layout_, at::cat({zero, one}, -1),
                        at::constant_pad_nd(values_from_zero_, {0, K}), KeepStates::kNo)
                .last;
        return split_summary(last);
    }

    GdnOutput forward(const Tensor& S_start) override {
        const c10::NoGradGuard no_grad;
        check_optional_shape(S_start, "S_start", state_shape());
        restore_intermediates();
        S_start_ = S_start.defined() ? S_start.detach() : S_start;
        has_forward_ = true;
        // The pass overwrites the values, so those that summary() left are used up.
        const Tensor values = values_from_zero_.defined()
                                  ? std::exchange(values_from_zero_, Tensor())
                                  : make_values_from_zero();
        forward_ = run_forward(factors_, layout_, start_states(S_start), values, KeepStates::kYes);
        const Tensor o =
            at::bmm(factors_.q_read, forward_.states).baddbmm_(attention_scores(), forward_.values);
        return {.o = layout_.to_tokens(o, problem_.value_heads(), problem_.inputs.v.scalar_type()),
                .S_end = layout_.to_segment_order(forward_.last, problem_.value_heads())};
    }

    void release_intermediates() override {
        factors_ = {};
        values_from_zero_.reset();
        forward_ = {};
        are_released_ = true;
    }

    Tensor gradient_summary(const Tensor& d_o) override {
        const c10::NoGradGuard no_grad;
        restore_intermediates();
        prepared_gradient_ = take_output_gradient(d_o);
        prepared_for_ = d_o;
        prepared_version_ = d_o.defined() ? d_o._version() : 0;
        if (!windows_.reverse_is_whole()) {
            return layout_.to_segment_order(
                gradient_summary_windows(factors_, layout_, windows_, prepared_gradient_),
                problem_.value_heads());
        }
        const OutputGradient copy{.d_o = prepared_gradient_.d_o,
                                  .values = prepared_gradient_.values.clone()};
        const StatePass reverse =
            run_reverse(factors_, layout_, start_states(Tensor()), copy, KeepStates::kNo);
        return layout_.to_segment_order(reverse.last, problem_.value_heads());
    }

    GdnGradients backward(const Tensor& d_o, const Tensor& dS_end) override {
        const c10::NoGradGuard no_grad;
        check_optional_shape(dS_end, "dS_end", state_shape());
        restore_intermediates();
        const OutputGradient gradient = take_output_gradient(d_o);
        const StatePass reverse =
            run_reverse(factors_, layout_, start_states(dS_end), gradient, KeepStates::kYes);
        return chunk_gradients(problem_, layout_, factors_,
                               {.forward = forward_, .reverse = reverse, .gradient = gradient});
    }

  private:
    /// Reading the gates would make the host wait for another device; without unit keys they bound
    /// nothing.
    [[nodiscard]] bool has_windows() const {
        return problem_.inputs.g.is_cpu() && problem_.use_qk_l2norm;
    }

    void restore_intermediates() {
        if (!std::exchange(are_released_, false)) {
            return;
        }
        factors_ = make_chunk_factors(problem_, layout_, type_);
        if (has_forward_) {
            forward_ = run_forward(factors_, layout_, start_states(S_start_),
                                   make_values_from_zero(), KeepStates::kYes);
        }
    }

    [[nodiscard]] std::vector<std::int64_t> state_shape() const {
        return {problem_.num_segments(), problem_.value_heads(), problem_.key_dim(),
                problem_.value_dim()};
    }

    /// `states` [N, Hv, K, V], or zeros when undefined, in the layout's order.
    [[nodiscard]] Tensor start_states(const Tensor& states) const {
        return layout_.to_step_order(
            states.defined() ? states
                             : at::zeros(state_shape(), problem_.inputs.q.options().dtype(type_)),
            type_);
    }

    /// (S | M) [N*Hv, K, V+K] in the layout's order.
    [[nodiscard]] GdnSummary split_summary(const Tensor& both) const {
        const Tensor summary = layout_.to_segment_order(both, problem_.value_heads());
        const std::int64_t V = problem_.value_dim();
        return {.S = summary.narrow(-1, 0, V).contiguous(),
                .M = summary.narrow(-1, V, problem_.key_dim()).contiguous()};
    }

    /// T (beta V): the new values where the start state is zero.
    [[nodiscard]] Tensor make_values_from_zero() const {
        return solve(factors_.system,
                     layout_.to_chunks(problem_.inputs.v, type_).mul_(factors_.beta));
    }

    /// P
    [[nodiscard]] Tensor attention_scores() const {
        return times_value_heads(factors_.qk, factors_.decay, factors_.group);
    }

    /// dO and P^T dO. What gradient_summary() prepared for the same, unchanged tensor is used up.
    [[nodiscard]] OutputGradient take_output_gradient(const Tensor& d_o) {
        HCP_CHECK(has_forward_, "gdn: call forward() before backward() or gradient_summary()");
        check_optional_shape(d_o, "d_o", problem_.inputs.v.sizes());
        OutputGradient prepared = std::exchange(prepared_gradient_, OutputGradient());
        if (prepared.values.defined() && d_o.defined() && prepared_for_.is_same(d_o) &&
            prepared_version_ == d_o._version()) {
            return prepared;
        }
        const Tensor chunks = layout_.to_chunks(
            d_o.defined() ? d_o.detach() : at::zeros_like(problem_.inputs.v), type_);
        return {.d_o = chunks, .values = at::bmm(attention_scores().mT(), chunks)};
    }

    Problem problem_;
    at::ScalarType type_;  // of the arithmetic but for the gates
    std::shared_ptr<const ChunkLayout> chunks_;
    const ChunkLayout& layout_;
    ChunkFactors factors_;
    SummaryWindows windows_;   // without truncation where nothing may be left out
    Tensor values_from_zero_;  // [B, C, V], between summary() and forward()
    Tensor S_start_;           // of the last forward()
    StatePass forward_;        // of the last forward(), unless released
    bool has_forward_ = false;
    bool are_released_ = false;
    OutputGradient prepared_gradient_;  // between gradient_summary() and backward()
    Tensor prepared_for_;
    std::int64_t prepared_version_ = 0;
};

}  // namespace

std::shared_ptr<GdnCall> make_eager_call(Problem problem) {
    return std::make_shared<EagerCall>(std::move(problem));
}

}  // namespace hybridcp::gdn
