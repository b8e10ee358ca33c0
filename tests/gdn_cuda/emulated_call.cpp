#include "gdn_cuda/emulated_call.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "gdn_cuda/support.h"
#include "kernels/gdn/cuda/forward.cuh"
#include "kernels/gdn/cuda/gradients.cuh"
#include "kernels/gdn/cuda/state_gradient.cuh"

namespace hybridcp::test {
namespace {

using namespace gdn::cuda;  // NOLINT(google-build-using-namespace)
using at::Tensor;

Tensor images(std::int64_t heads, std::int64_t chunks, std::uint32_t bytes) {
    return at::full({heads, chunks, std::int64_t{bytes}}, 0xff, at::kByte);
}

class EmulatedCall final : public GdnCall {
  public:
    EmulatedCall(const GdnInputs& inputs,
                 const std::vector<std::int64_t>& offsets,
                 const GdnOptions& options,
                 int pieces,
                 std::uint64_t seed)
        : seed_(seed), tables_(make_tables(offsets, pieces)), whole_(make_tables(offsets, 1)) {
        problem_.inputs = {inputs.q.contiguous(), inputs.k.contiguous(), inputs.v.contiguous(),
                           inputs.g.to(at::kFloat).contiguous(), inputs.beta.contiguous()};
        problem_.offsets = offsets;
        problem_.options = options;
    }
    [[nodiscard]] const std::vector<bool>* independent() const override { return nullptr; }
    void release_intermediates() override {}

    [[nodiscard]] GdnSummary summary() override {
        GdnSummary result{.S = states(), .M = states()};
        for (const std::int64_t segment : empty_segments()) {
            result.S[segment].zero_();
            result.M[segment].copy_(at::eye(kHeadDim));
        }
        ForwardParams p = forward_params(whole_);
        p.end_states = result.S.mutable_data_ptr<float>();
        p.transitions = result.M.mutable_data_ptr<float>();
        p.summary_floor = floor();
        walk<SummaryConfig>(p, 2 * p.num_pieces);
        return result;
    }
    [[nodiscard]] GdnOutput forward(const Tensor& S_start) override {
        start_ = S_start.defined() ? S_start.contiguous() : S_start;
        GdnOutput result{.o = at::zeros_like(problem_.inputs.v), .S_end = states()};
        pass_empty_segments(result.S_end, start_);
        norms_ = at::empty({2, problem_.key_heads(), problem_.tokens()}, at::kFloat);
        ForwardParams p = forward_params(tables_);
        p.q = tensor_map(problem_.inputs.q);
        p.o = tensor_map(result.o);
        p.o_rows = static_cast<std::uint16_t*>(result.o.data_ptr());
        p.o_token_stride = result.o.stride(0);
        p.o_head_stride = result.o.stride(1);
        p.end_states = result.S_end.mutable_data_ptr<float>();
        p.q_norms = norms_[0].mutable_data_ptr<float>();
        p.k_norms = norms_[1].mutable_data_ptr<float>();
        walk<OutputConfig>(p, p.num_pieces);
        remake();
        return result;
    }
    [[nodiscard]] Tensor gradient_summary(const Tensor& d_o) override {
        Tensor dS = at::zeros_like(states());
        StateGradientParams p = state_gradient_params(whole_, d_o);
        p.d_start = dS.mutable_data_ptr<float>();
        p.summary_floor = floor();
        walk_back(p, whole_);
        return dS;
    }
    [[nodiscard]] GdnGradients backward(const Tensor& d_o, const Tensor& dS_end) override;

  private:
    void remake() {
        states_ = images(problem_.heads(), chunks(), kStateBytes);
        errors_ = images(problem_.heads(), chunks(), kRowsBytes);
        inverses_ = images(problem_.heads(), chunks(), kInverseBytes);
        ForwardParams p = forward_params(tables_);
        p.states = static_cast<std::uint16_t*>(states_.data_ptr());
        p.errors = static_cast<std::uint16_t*>(errors_.data_ptr());
        p.inverses = static_cast<std::uint16_t*>(inverses_.data_ptr());
        walk<RemakeConfig>(p, p.num_pieces);
    }

    [[nodiscard]] ForwardParams forward_params(const Tables& tables) const {
        ForwardParams p{};
        p.k = tensor_map(problem_.inputs.k);
        p.v = tensor_map(problem_.inputs.v);
        p.gates = gates_of(problem_);
        p.shape = shape_of(problem_, tables_);
        p.chunks = tables.chunks.data();
        p.pieces = tables.pieces.data();
        p.num_pieces = static_cast<std::int32_t>(tables.pieces.size());
        p.may_truncate = problem_.options.use_qk_l2norm;
        p.start_states = start_.defined() ? start_.const_data_ptr<float>() : nullptr;
        return p;
    }
    template <class Config>
    void walk(const ForwardParams& p, std::int64_t pieces) const {
        if (pieces > 0) {
            simt::launch({.blocks = static_cast<std::uint32_t>(2 * problem_.heads() * pieces),
                          .threads = Config::kThreads,
                          .cluster = Config::kCluster,
                          .shared_bytes = Config::kSharedBytes,
                          .seed = seed_},
                         [&] { forward_kernel<Config>(p); });
        }
    }

    [[nodiscard]] StateGradientParams state_gradient_params(const Tables& tables,
                                                            const Tensor& d_o) const {
        StateGradientParams p{};
        p.q = tensor_map(problem_.inputs.q);
        p.k = tensor_map(problem_.inputs.k);
        p.d_o = tensor_map(d_o);
        p.gates = gates_of(problem_);
        p.shape = shape_of(problem_, tables_);
        p.chunks = tables.chunks.data();
        p.pieces = tables.pieces.data();
        p.q_norms = norms_[0].const_data_ptr<float>();
        p.k_norms = norms_[1].const_data_ptr<float>();
        p.inverses = inverses_.const_data_ptr<std::uint8_t>();
        p.may_truncate = problem_.options.use_qk_l2norm;
        return p;
    }
    void walk_back(const StateGradientParams& p, const Tables& tables) const {
        if (!tables.pieces.empty()) {
            simt::launch({.blocks = static_cast<std::uint32_t>(2 * problem_.heads()) *
                                    static_cast<std::uint32_t>(tables.pieces.size()),
                          .threads = StateGradientLayout::kThreads,
                          .shared_bytes = StateGradientLayout::kSharedBytes,
                          .seed = seed_},
                         [&] { state_gradient_kernel(p); });
        }
    }

    [[nodiscard]] Tensor states() const {
        return at::full({problem_.segments(), problem_.heads(), kHeadDim, kHeadDim}, NAN,
                        at::kFloat);
    }
    [[nodiscard]] std::int64_t chunks() const {
        return static_cast<std::int64_t>(tables_.chunks.size());
    }
    [[nodiscard]] float floor() const {
        return problem_.options.use_qk_l2norm
                   ? static_cast<float>(
                         problem_.options.summary_floor.value_or(GdnOptions::kExactSummary))
                   : -std::numeric_limits<float>::infinity();
    }
    [[nodiscard]] std::vector<std::int64_t> empty_segments() const {
        std::vector<std::int64_t> found;
        for (std::size_t i = 0; i + 1 < problem_.offsets.size(); ++i) {
            if (problem_.offsets[i] == problem_.offsets[i + 1]) {
                found.push_back(static_cast<std::int64_t>(i));
            }
        }
        return found;
    }
    void pass_empty_segments(Tensor& to, const Tensor& from) const {
        for (const std::int64_t segment : empty_segments()) {
            to[segment].copy_(from.defined() ? from[segment] : at::zeros_like(to[segment]));
        }
    }

    std::uint64_t seed_;
    GdnProblem problem_;
    Tables tables_, whole_;
    Tensor start_, norms_, states_, errors_, inverses_;
};

GdnGradients EmulatedCall::backward(const Tensor& d_o, const Tensor& dS_end) {
    const Tensor d_o_rows = d_o.defined() ? d_o.contiguous() : at::zeros_like(problem_.inputs.v);
    const Tensor d_end = dS_end.defined() ? dS_end.contiguous() : dS_end;
    GdnGradients result{.dq = at::zeros_like(problem_.inputs.q),
                        .dk = at::zeros_like(problem_.inputs.k),
                        .dv = at::zeros_like(problem_.inputs.v),
                        .dg = at::zeros_like(problem_.inputs.g),
                        .dbeta = at::zeros_like(problem_.inputs.g),
                        .dS_start = states()};
    pass_empty_segments(result.dS_start, d_end);
    Tensor d_states = images(problem_.heads(), chunks(), kStateBytes);
    Tensor d_new_values = images(problem_.heads(), chunks(), kRowsBytes);
    StateGradientParams walk = state_gradient_params(tables_, d_o_rows);
    walk.d_end = d_end.defined() ? d_end.const_data_ptr<float>() : nullptr;
    walk.d_start = result.dS_start.mutable_data_ptr<float>();
    walk.d_states = d_states.mutable_data_ptr<std::uint8_t>();
    walk.d_new_values = d_new_values.mutable_data_ptr<std::uint8_t>();
    walk_back(walk, tables_);
    GradientsParams p{};
    p.q = walk.q;
    p.k = walk.k;
    p.d_o = walk.d_o;
    p.shape = walk.shape;
    p.has_d_o = true;
    p.gates = walk.gates;
    p.r_q = walk.q_norms;
    p.r_k = walk.k_norms;
    p.chunks = walk.chunks;
    p.e = errors_.const_data_ptr<std::uint8_t>();
    p.z = walk.d_new_values;
    p.inverse = walk.inverses;
    p.state = states_.const_data_ptr<std::uint8_t>();
    p.state_gradient = walk.d_states;
    p.dq = static_cast<std::uint16_t*>(result.dq.data_ptr());
    p.dk = static_cast<std::uint16_t*>(result.dk.data_ptr());
    p.dv = static_cast<std::uint16_t*>(result.dv.data_ptr());
    p.dg = result.dg.mutable_data_ptr<float>();
    p.dbeta = result.dbeta.mutable_data_ptr<float>();
    p.dg_token_stride = p.dbeta_token_stride = problem_.heads();
    p.dg_head_stride = p.dbeta_head_stride = 1;
    const auto group = static_cast<std::uint32_t>(problem_.heads() / problem_.key_heads());
    const auto items = static_cast<std::uint32_t>(chunks() * problem_.key_heads());
    if (items > 0) {
        simt::launch({.blocks = std::min<std::uint32_t>(items, 2) * group,
                      .threads = GradientsConfig::kThreads,
                      .cluster = group,
                      .shared_bytes = GradientsConfig::kSharedBytes,
                      .seed = seed_},
                     [&] { gradients_kernel<GradientsConfig>(p); });
    }
    return result;
}

}  // namespace

std::shared_ptr<GdnCall> make_emulated_call(const GdnInputs& inputs,
                                            const std::vector<std::int64_t>& offsets,
                                            const GdnOptions& options,
                                            int pieces,
                                            std::uint64_t seed) {
    return std::make_shared<EmulatedCall>(inputs, offsets, options, pieces, seed);
}

}  // namespace hybridcp::test
