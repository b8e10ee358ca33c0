// The specification: the recurrence of gdn.h token by token in fp64. Gradients come from autograd
// over that recurrence, so that they share no formula with the chunked backends. Slow, and its
// memory grows with T K V.
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include "hybridcp/error.h"
#include "kernels/gdn/backends.h"

namespace hybridcp::gdn {
namespace {

using at::Tensor;

class ReferenceCall final : public GdnCall {
  public:
    explicit ReferenceCall(Problem problem) : problem_(std::move(problem)) {}

    /// The specification computes every M.
    const std::vector<bool>* independent() const override { return nullptr; }

    GdnSummary summary() override {
        const c10::NoGradGuard no_grad;
        const std::int64_t K = problem_.key_dim();
        const std::int64_t V = problem_.value_dim();
        const Leaves leaves = make_leaves(Tensor());
        // K more columns start at I and are written no values: they become M.
        const Tensor identity =
            at::eye(K, leaves.v.options()).expand({leaves.S.size(0), leaves.S.size(1), K, K});
        const Tensor start = at::cat({at::zeros_like(leaves.S), identity}, -1);
        const Tensor end = run({leaves.q, leaves.k, at::constant_pad_nd(leaves.v, {0, K}), leaves.g,
                                leaves.beta, start})
                               .S_end;
        return {.S = end.narrow(-1, 0, V).contiguous(), .M = end.narrow(-1, V, K).contiguous()};
    }

    GdnOutput forward(const Tensor& S_start) override {
        check_optional_shape(S_start, "S_start", state_shape());
        const c10::AutoGradMode with_grad(true);
        leaves_ = make_leaves(S_start);
        for (Tensor* leaf :
             {&leaves_.q, &leaves_.k, &leaves_.v, &leaves_.g, &leaves_.beta, &leaves_.S}) {
            leaf->requires_grad_(true);
        }
        result_ = run(leaves_);
        return {.o = result_.o.detach().to(problem_.inputs.v.scalar_type()),
                .S_end = result_.S_end.detach().clone()};
    }

    void release_intermediates() override {}
    Tensor gradient_summary(const Tensor& d_o) override {
        return gradients(d_o, Tensor(), {leaves_.S})[0];
    }

    GdnGradients backward(const Tensor& d_o, const Tensor& dS_end) override {
        const GdnInputs& in = problem_.inputs;
        auto grads = gradients(
            d_o, dS_end, {leaves_.q, leaves_.k, leaves_.v, leaves_.g, leaves_.beta, leaves_.S});
        return {.dq = grads[0].to(in.q.scalar_type()),
                .dk = grads[1].to(in.k.scalar_type()),
                .dv = grads[2].to(in.v.scalar_type()),
                .dg = grads[3].to(in.g.scalar_type()),
                .dbeta = grads[4].to(in.beta.scalar_type()),
                .dS_start = grads[5]};
    }

  private:
    struct Leaves {
        Tensor q, k, v, g, beta;  // inputs in fp64
        Tensor S;                 // [N, Hv, K, V] start states
    };

    [[nodiscard]] std::vector<std::int64_t> state_shape() const {
        return {problem_.num_segments(), problem_.value_heads(), problem_.key_dim(),
                problem_.value_dim()};
    }

    [[nodiscard]] Leaves make_leaves(const Tensor& S_start) const {
        const auto fp64 = [](const Tensor& x) { return x.detach().to(at::kDouble, false, true); };
        const GdnInputs& in = problem_.inputs;
        return {fp64(in.q),
                fp64(in.k),
                fp64(in.v),
                fp64(in.g),
                fp64(in.beta),
                S_start.defined() ? fp64(S_start)
                                  : at::zeros(state_shape(), in.q.options().dtype(at::kDouble))};
    }

    /// x^ of the value heads: normalised, and each key head repeated for the value heads that read
    /// it.
    [[nodiscard]] Tensor normalised(const Tensor& x) const {
        const Tensor unit =
            problem_.use_qk_l2norm ? x * at::rsqrt((x * x).sum(-1, true) + 1e-6) : x;
        return unit.repeat_interleave(problem_.value_heads() / problem_.key_heads(), 1);
    }

    [[nodiscard]] GdnOutput run(const Leaves& in) const {
        // Padding is left out. Tokens are sliced once: a slice per token would make autograd
        // quadratic in T.
        const auto in_segments = [&](const Tensor& x) {
            return x.narrow(0, 0, problem_.offsets.back());
        };
        const auto q = (normalised(in_segments(in.q)) * problem_.scale).unbind(0);
        const auto k = normalised(in_segments(in.k)).unbind(0);
        const auto v = in_segments(in.v).unbind(0);
        const auto decay = at::exp(in_segments(in.g)).unbind(0);
        const auto beta = in_segments(in.beta).unbind(0);
        std::vector<Tensor> o;
        std::vector<Tensor> ends = in.S.unbind(0);
        for (std::size_t segment = 0; segment < ends.size(); ++segment) {
            Tensor& S = ends[segment];  // [Hv, K, V]
            for (auto t = o.size(); t < static_cast<std::size_t>(problem_.offsets[segment + 1]);
                 ++t) {
                S = S * decay[t].view({-1, 1, 1});
                const Tensor read = at::matmul(k[t].unsqueeze(1), S).squeeze(1);  // [Hv, V]
                const Tensor u = beta[t].unsqueeze(1) * (v[t] - read);
                S = S + k[t].unsqueeze(2) * u.unsqueeze(1);
                o.push_back(at::matmul(q[t].unsqueeze(1), S).squeeze(1));
            }
        }
        o.resize(static_cast<std::size_t>(problem_.num_tokens()),
                 at::zeros(in.v.sizes().slice(1), in.v.options()));
        return {.o = o.empty() ? at::zeros_like(in.v) : at::stack(o),
                .S_end = ends.empty() ? at::zeros_like(in.S) : at::stack(ends)};
    }

    /// Gradients of <o, d_o> + <S_end, dS_end> with respect to `leaves`.
    [[nodiscard]] std::vector<Tensor> gradients(const Tensor& d_o,
                                                const Tensor& dS_end,
                                                const std::vector<Tensor>& leaves) const {
        HCP_CHECK(result_.o.defined(), "gdn: backward() needs forward() first");
        check_optional_shape(d_o, "d_o", problem_.inputs.v.sizes());
        check_optional_shape(dS_end, "dS_end", state_shape());
        const c10::AutoGradMode with_grad(true);
        const auto upstream = [](const Tensor& gradient, const Tensor& output) {
            return gradient.defined() ? gradient.detach().to(at::kDouble) : at::zeros_like(output);
        };
        std::vector<Tensor> outputs;
        std::vector<Tensor> upstreams;
        for (const auto& [output, gradient] :
             {std::pair{&result_.o, &d_o}, std::pair{&result_.S_end, &dS_end}}) {
            if (output->requires_grad()) {  // no output depends on anything when T = 0
                outputs.push_back(*output);
                upstreams.push_back(upstream(*gradient, *output));
            }
        }
        auto grads = outputs.empty()
                         ? std::vector<Tensor>(leaves.size())
                         : torch::autograd::grad(outputs, leaves, upstreams, true, false, true);
        for (std::size_t i = 0; i < leaves.size(); ++i) {
            grads[i] = grads[i].defined() ? grads[i].detach() : at::zeros_like(leaves[i].detach());
        }
        return grads;
    }

    Problem problem_;
    Leaves leaves_;     // of the last forward(), with gradients
    GdnOutput result_;  // attached to the graph
};

}  // namespace

std::shared_ptr<GdnCall> make_reference_call(Problem problem) {
    return std::make_shared<ReferenceCall>(std::move(problem));
}

}  // namespace hybridcp::gdn
