// The backward walk over states in the emulator, against the fp64 reference.

#include "kernels/gdn/cuda/state_gradient.cuh"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_inv.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Half.h>

#include <bit>

#include "gdn_cuda/operands.h"
#include "gdn_cuda/support.h"
#include "kernels/gdn_support.h"
#include "simt/half.h"
#include "simt/launch.h"

namespace hybridcp::test {
namespace {

namespace cuda = gdn::cuda;

/// [64, columns] of a panel image of operands times 2^exponent, columns a multiple of 64.
at::Tensor from_panels(const uint8_t* image, int64_t rows, int64_t columns, int exponent) {
    at::Tensor x = at::empty({rows, columns}, at::kDouble);
    auto* values = x.mutable_data_ptr<double>();
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            const int64_t panel = (r / 64) * (columns / 64) + c / 64;
            const uint32_t at =
                device::swizzle_128(static_cast<uint32_t>(128 * (r % 64) + 2 * (c % 64)));
            uint16_t bits;
            std::memcpy(&bits, image + panel * cuda::kPanelBytes + at, 2);
            const double value = cuda::kFp16
                                     ? double{simt::f16_value(bits)}
                                     : double{c10::BFloat16(bits, c10::BFloat16::from_bits())};
            values[r * columns + c] = std::ldexp(value, exponent);
        }
    }
    return x;
}

struct Factors {
    at::Tensor T, sums;  // [64, 64] fp64 and [64]
};

struct Walk {
    GdnCase problem;
    std::vector<cuda::Chunk> chunks;
    at::Tensor q_norms, k_norms;  // [Hk, T]
    std::vector<uint8_t> inverses, d_states;
    at::Tensor d_new_values;        // [T, Hv, 128] in the kernels' type of operands
    std::vector<uint32_t> ready;    // [heads, chunks]
    std::vector<uint32_t> largest;  // [heads], bits
    at::Tensor d_start;

    [[nodiscard]] at::Tensor rows(const at::Tensor& x,
                                  const cuda::Chunk& chunk,
                                  int64_t head) const {
        return x.slice(0, chunk.token, chunk.token + chunk.tokens).select(1, head).to(at::kDouble);
    }
    [[nodiscard]] Factors factors(const cuda::Chunk& chunk, int64_t head) const {
        const auto& in = problem.inputs;
        const int64_t key_head = head / (in.v.size(1) / in.k.size(1));
        const at::Tensor k =
            rows(in.k, chunk, key_head) * k_norms[key_head]
                                              .slice(0, chunk.token, chunk.token + chunk.tokens)
                                              .to(at::kDouble)
                                              .unsqueeze(1);
        const at::Tensor sums = rows(in.g, chunk, head).clamp_min(-88.0).cumsum(0);
        const at::Tensor gaps = (sums.unsqueeze(1) - sums.unsqueeze(0)).clamp_max(0.0).exp();
        const at::Tensor L =
            (rows(in.beta, chunk, head).unsqueeze(1) * at::matmul(k, k.t()) * gaps).tril(-1);
        const at::Tensor T = at::linalg_inv(at::eye(chunk.tokens, at::kDouble) + L);
        return {T, sums};
    }
    /// Of finite numbers of segments.
    void find_largest(bool with_d_end) {
        const auto head_maxima = [](const at::Tensor& x) {
            const at::Tensor size = x.to(at::kFloat).abs().transpose(0, 1).flatten(1);
            return at::where(size.isfinite(), size, 0.0).amax(1);
        };
        at::Tensor most = head_maxima(problem.d_o.slice(0, 0, problem.offsets.back()));
        if (with_d_end && problem.dS_end.defined()) {
            most = at::maximum(most, head_maxima(problem.dS_end));
        }
        for (int64_t head = 0; head < most.size(0); ++head) {
            largest.push_back(std::bit_cast<uint32_t>(most[head].item<float>()));
        }
    }
    [[nodiscard]] float scale() const {
        return static_cast<float>(problem.options.scale.value_or(1.0 / std::sqrt(128.0)));
    }
    [[nodiscard]] int exponent(int64_t head) const {
        return cuda::kFp16 ? cuda::exponent_of(
                                 largest[static_cast<std::size_t>(head)],
                                 cuda::room_of_gradients(scale(), problem.options.use_qk_l2norm))
                           : 0;
    }
    void write_inverses() {
        const int64_t heads = problem.inputs.v.size(1);
        const auto count = static_cast<int64_t>(chunks.size());
        inverses.assign(static_cast<std::size_t>(heads * count) * cuda::kInverseBytes, 0);
        for (int64_t head = 0; head < heads; ++head) {
            for (int64_t c = 0; c < count; ++c) {
                const at::Tensor T = factors(chunks[static_cast<std::size_t>(c)], head).T;
                const auto entry = T.accessor<double, 2>();
                for (int64_t r = 0; r < 64; ++r) {
                    for (int64_t j = 0; j < 16 * (r / 16 + 1); ++j) {
                        const bool inside = r < T.size(0) && j < T.size(0);
                        const auto value = c10::Half(
                            static_cast<float>(inside ? entry[r][j] : (r == j ? 1.0 : 0.0)));
                        std::memcpy(
                            inverses.data() + (head * count + c) * cuda::kInverseBytes +
                                inverse_at(static_cast<uint32_t>(r), static_cast<uint32_t>(j)),
                            &value.x, 2);
                    }
                }
            }
        }
    }
};

struct Run {
    int32_t pieces = 1;
    bool may_truncate = true, summary = false;
    float summary_floor = -INFINITY;
    uint64_t seed = 1;
};

Walk walk(const GdnCase& problem, const Run& run) {
    Walk w;
    w.problem = problem;
    const Tables tables = make_tables(problem.offsets, run.pieces);
    w.chunks = tables.chunks;
    const auto& in = problem.inputs;
    const auto norms = [&](const at::Tensor& x) {
        const at::Tensor squares = x.to(at::kFloat).square().sum(2).t().contiguous();
        return problem.options.use_qk_l2norm ? (squares + 1e-6).rsqrt() : at::ones_like(squares);
    };
    w.q_norms = norms(in.q);
    w.k_norms = norms(in.k);
    w.write_inverses();
    w.find_largest(!run.summary);
    const int64_t heads = in.v.size(1);
    const std::size_t images = static_cast<std::size_t>(heads) * w.chunks.size();
    w.d_states.assign(images * cuda::kStateBytes, 0xff);
    w.d_new_values = poisoned({in.q.size(0), heads, 128}, cuda::kFp16 ? at::kHalf : at::kBFloat16);
    w.ready.assign(images, 99);
    uint32_t items = 99;
    const cuda::TokenRows rows = {tensor_map(w.d_new_values),
                                  static_cast<uint16_t*>(w.d_new_values.data_ptr()),
                                  w.d_new_values.stride(0), w.d_new_values.stride(1)};
    const cuda::Progress progress = {&items, w.ready.data()};
    const auto segments = static_cast<int64_t>(problem.offsets.size()) - 1;
    w.d_start = at::full({segments, heads, 128, 128}, NAN, at::kFloat);
    const std::vector<cuda::Piece>& pieces = tables.pieces;
    cuda::StateGradientParams p{
        .q = tensor_map(in.q),
        .k = tensor_map(in.k),
        .d_o = tensor_map(problem.d_o),
        .gates = {in.g.data_ptr<float>(), in.g.stride(0), in.g.stride(1), in.beta.data_ptr(),
                  in.beta.stride(0), in.beta.stride(1), in.beta.scalar_type() == at::kBFloat16},
        .shape = {static_cast<int32_t>(in.q.size(0)), static_cast<int32_t>(in.q.size(1)),
                  static_cast<int32_t>(heads), static_cast<int32_t>(w.chunks.size()), w.scale(),
                  problem.options.use_qk_l2norm},
        .chunks = w.chunks.data(),
        .pieces = pieces.data(),
        .q_norms = w.q_norms.data_ptr<float>(),
        .k_norms = w.k_norms.data_ptr<float>(),
        .inverses = w.inverses.data(),
        .largest = w.largest.data(),
        .d_end =
            problem.dS_end.defined() && !run.summary ? problem.dS_end.data_ptr<float>() : nullptr,
        .d_start = w.d_start.data_ptr<float>(),
        .d_states = run.summary ? nullptr : w.d_states.data(),
        .d_new_values = rows,
        .progress = run.summary ? cuda::Progress{} : progress,
        .may_truncate = run.may_truncate,
        .summary_floor = run.summary_floor};
    simt::launch(
        {.blocks = static_cast<uint32_t>(pieces.size() * 2 * static_cast<std::size_t>(heads)),
         .threads = cuda::StateGradientLayout::kThreads,
         .cluster = cuda::StateGradientLayout::kCluster,
         .shared_bytes = cuda::StateGradientLayout::kSharedBytes,
         .seed = run.seed},
        [&] { cuda::state_gradient_kernel(p); });
    if (!run.summary) {
        EXPECT_EQ(items, 0U);
        EXPECT_EQ(w.ready, std::vector<uint32_t>(images, cuda::kHalves));
    }
    return w;
}

/// dS_start of the tokens [begin, end) of a segment.
at::Tensor gradient_before(const GdnCase& problem,
                           int64_t begin,
                           int64_t end,
                           const at::Tensor& d_end) {
    const auto part = [&](const at::Tensor& x) { return x.slice(0, begin, end); };
    const auto& in = problem.inputs;
    const auto call = make_gdn_call(GdnBackend::kReference,
                                    {part(in.q), part(in.k), part(in.v), part(in.g), part(in.beta)},
                                    GdnSegments({0, end - begin}), problem.options);
    (void)call->forward({});
    return call->backward(part(problem.d_o), d_end).dS_start[0];
}

void check_states(const Walk& w, double bar) {
    const auto& problem = w.problem;
    const int64_t heads = problem.inputs.v.size(1);
    int64_t index = 0;
    for (std::size_t segment = 0; segment + 1 < problem.offsets.size(); ++segment) {
        const int64_t end = problem.offsets[segment + 1];
        const at::Tensor d_end = problem.dS_end.defined()
                                     ? problem.dS_end.slice(0, segment, segment + 1)
                                     : problem.dS_end;
        for (int64_t begin = problem.offsets[segment]; begin < end; begin += 64, ++index) {
            const int64_t after = std::min(begin + 64, end);
            const at::Tensor expected = gradient_before(problem, after, end, d_end);
            const at::Tensor at_start = gradient_before(problem, begin, end, d_end);
            for (int64_t head = 0; head < heads; ++head) {
                const int64_t at = head * static_cast<int64_t>(w.chunks.size()) + index;
                const at::Tensor state = from_panels(w.d_states.data() + at * cuda::kStateBytes,
                                                     128, 128, w.exponent(head))
                                             .t();
                if (expected[head].norm().item<double>() > 1e-6) {
                    EXPECT_LT(relative_error(state, expected[head]), bar) << index << " " << head;
                }
                if (begin == problem.offsets[segment]) {
                    EXPECT_LT(relative_error(w.d_start[static_cast<int64_t>(segment)][head],
                                             at_start[head]),
                              bar);
                }
            }
        }
    }
}

/// Z through dV = beta T^T Z.
void check_new_values(const Walk& w, double bar) {
    const auto& problem = w.problem;
    const auto call = make_gdn_call(GdnBackend::kReference, problem.inputs,
                                    GdnSegments(problem.offsets), problem.options);
    (void)call->forward(problem.S_start);
    const at::Tensor d_v = call->backward(problem.d_o, problem.dS_end).dv;
    const int64_t heads = problem.inputs.v.size(1);
    for (int64_t head = 0; head < heads; ++head) {
        for (std::size_t c = 0; c < w.chunks.size(); ++c) {
            const auto& chunk = w.chunks[c];
            const at::Tensor Z = w.rows(w.d_new_values, chunk, head) * std::exp2(w.exponent(head));
            const at::Tensor T = w.factors(chunk, head).T;
            const at::Tensor actual =
                w.rows(problem.inputs.beta, chunk, head).unsqueeze(1) * at::matmul(T.t(), Z);
            EXPECT_LT(relative_error(actual, w.rows(d_v, chunk, head)), bar) << c << " " << head;
        }
    }
}

constexpr double kBar = cuda::kFp16 ? 1e-3 : 5e-3;

TEST(StateGradient, MatchesTheReference) {
    for (const std::int64_t tokens : {1, 63, 64, 65, 200}) {
        const Walk w =
            walk(bf16_case({0, tokens}, 1, 2, 3), {.seed = static_cast<uint64_t>(tokens)});
        SCOPED_TRACE(tokens);
        check_states(w, kBar);
        check_new_values(w, 2 * kBar);
    }
}

TEST(StateGradient, PackedSegments) {
    const Walk w = walk(bf16_case({0, 65, 65, 100, 229}, 1, 1, 5), {.seed = 2});
    check_states(w, kBar);
    check_new_values(w, 2 * kBar);
}

TEST(StateGradient, PiecesMeetTheWhole) {
    for (const bool truncate : {false, true}) {
        const Walk w = walk(bf16_case({0, 500}, 1, 2, 7),
                            {.pieces = truncate ? 3 : 2, .may_truncate = truncate, .seed = 3});
        SCOPED_TRACE(truncate);
        check_states(w, kBar);
    }
}

TEST(StateGradient, SummaryWalksTheChunksThatMatter) {
    GdnCase problem = bf16_case({0, 700}, 1, 2, 9);
    for (const float floor : {-INFINITY, -25.0F}) {
        // The second head forgets within two chunks.
        problem.inputs.g.select(1, 0).fill_(-0.003);
        problem.inputs.g.select(1, 1).fill_(-0.3);
        const Walk w = walk(problem, {.summary = true, .summary_floor = floor, .seed = 4});
        const at::Tensor expected = gradient_before(problem, 0, 700, {});
        for (int64_t head = 0; head < 2; ++head) {
            EXPECT_LT(relative_error(w.d_start[0][head], expected[head]), kBar) << floor << head;
        }
    }
}

TEST(StateGradient, NanStaysInItsSegmentAndHead) {
    GdnCase problem = bf16_case({0, 70, 140}, 1, 2, 11);
    problem.d_o.slice(0, 70, 140).select(1, 0).fill_(NAN);
    problem.inputs.k.slice(0, 70, 71).fill_(NAN);
    const Walk w = walk(problem, {.seed = 5});
    for (int64_t head = 0; head < 2; ++head) {
        const at::Tensor expected = gradient_before(problem, 0, 70, problem.dS_end.slice(0, 0, 1));
        EXPECT_LT(relative_error(w.d_start[0][head], expected[head]), kBar) << head;
    }
}

}  // namespace
}  // namespace hybridcp::test
