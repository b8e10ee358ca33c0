// The forward kernel under the emulator against the fp64 recurrence.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <utility>

#include "gdn_cuda/forward_launch.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

Tensor row_norms(const Tensor& x, const GdnOptions& options) {
    const Tensor wide = x.to(at::kDouble);
    const Tensor norms = ((wide * wide).sum(-1) + 1e-6).rsqrt().t();
    return options.use_qk_l2norm ? norms : at::ones_like(norms);
}

// Outputs, end states and norms; rows outside the segments must not be touched.
void expect_forward(const GdnProblem& problem, const Run& run, const std::string& what) {
    SCOPED_TRACE(what);
    const Forward out = run_forward(problem, run);
    const GdnOutput expected = reference_forward(problem);
    expect_rows_close(out.o, expected.o, problem.offsets, kOutputBar, "o");
    for (std::int64_t segment = 0; segment < problem.segments(); ++segment) {
        const auto at = static_cast<std::size_t>(segment);
        if (problem.offsets[at] < problem.offsets[at + 1]) {  // else nobody writes
            expect_states_close(out.S_end.slice(0, segment, segment + 1),
                                expected.S_end.slice(0, segment, segment + 1), kForwardBar,
                                "S_end");
        }
    }
    const std::int64_t end = problem.offsets.back();
    EXPECT_TRUE(out.o.slice(0, end).isnan().all().item<bool>());
    EXPECT_TRUE(out.k_norms.slice(1, end).isnan().all().item<bool>());
    const auto expect_norms = [&](const Tensor& norms, const Tensor& x) {
        EXPECT_LE(
            relative_error(norms.slice(1, 0, end), row_norms(x, problem.options).slice(1, 0, end)),
            1e-5);
    };
    expect_norms(out.q_norms, problem.inputs.q);
    expect_norms(out.k_norms, problem.inputs.k);
}

TEST(ForwardKernel, OneSegmentOfAnyLength) {
    for (const std::int64_t tokens : {1, 63, 64, 65, 200, 500}) {
        const GdnProblem problem = make_problem(
            {.offsets = {0, tokens}, .group = tokens < 100 ? 2 : 1, .start_states = tokens != 200});
        expect_forward(problem, {.seed = static_cast<std::uint64_t>(tokens)},
                       std::to_string(tokens) + " tokens");
    }
}

// Odd sizes, an empty segment, padding behind, three value heads of which one does not decay.
TEST(ForwardKernel, PackedSegments) {
    GdnProblem problem = make_problem({.offsets = {0, 70, 71, 71, 199, 330}, .group = 3});
    problem.offsets.back() = 301;
    for (const std::uint64_t seed : {1, 2, 3}) {
        expect_forward(problem, {.seed = seed}, "seed " + std::to_string(seed));
    }
}

TEST(ForwardKernel, GatesFromNoneToVeryStrong) {
    for (const double log_decay : {0.0, -0.02, -21.0, -200.0}) {
        const GdnProblem problem = make_problem({.offsets = {0, 150}, .log_decay = log_decay});
        expect_forward(problem, {}, "log decay " + std::to_string(log_decay));
    }
}

TEST(ForwardKernel, NormalisesInputsOfAnyScale) {
    for (const double scale : {3.0, 0.01}) {
        const GdnProblem problem = make_problem(
            {.offsets = {0, 129}, .key_heads = 2, .qk_scale = scale, .fp32_beta = true});
        expect_forward(problem, {}, "scale " + std::to_string(scale));
    }
}

TEST(ForwardKernel, WithoutNormalisation) {
    GdnProblem problem = make_problem({.offsets = {0, 150}, .qk_scale = 0.08});
    problem.options.use_qk_l2norm = false;
    problem.options.scale = 0.5;
    expect_forward(problem, {}, "no normalisation");
}

// Slices of one projection, gates with the heads apart.
TEST(ForwardKernel, AnyStrides) {
    GdnProblem problem = make_problem({.offsets = {0, 90}, .key_heads = 2, .group = 2});
    GdnInputs& in = problem.inputs;
    const Tensor all = at::cat({in.q, in.k, in.v}, 1);
    in.q = all.slice(1, 0, 2);
    in.k = all.slice(1, 2, 4);
    in.v = all.slice(1, 4, 8);
    in.g = in.g.t().contiguous().t();
    in.beta = in.beta.t().contiguous().t();
    expect_forward(problem, {}, "strides");
}

TEST(ForwardKernel, PiecesGiveTheSame) {
    // The last head forgets within a chunk, the first one remembers all.
    const GdnProblem problem =
        make_problem({.offsets = {0, 130, 440}, .group = 3, .log_decay = -0.7});
    for (const int pieces : {2, 3}) {
        for (const bool may_truncate : {false, true}) {
            expect_forward(
                problem, {.pieces = pieces, .may_truncate = may_truncate, .seed = 5},
                std::to_string(pieces) + (may_truncate ? " pieces, truncated" : " pieces"));
        }
    }
}

// Segment 1 and head 1 hold NaN; the others do not notice.
TEST(ForwardKernel, NanStaysInItsSegmentAndHead) {
    GdnProblem problem = make_problem({.offsets = {0, 70, 140, 250}, .key_heads = 2});
    const GdnOutput expected = reference_forward(problem);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    GdnInputs& in = problem.inputs;
    for (Tensor* x : {&in.q, &in.k, &in.v, &in.g, &in.beta}) {
        x->slice(0, 70, 140).fill_(nan);
        x->select(1, 1).fill_(nan);
    }
    const Forward out = run_forward(problem, {.pieces = 2, .may_truncate = true});
    for (const auto& [begin, end] : {std::pair{0, 70}, std::pair{140, 250}}) {
        EXPECT_LE(relative_error(out.o.slice(0, begin, end).select(1, 0),
                                 expected.o.slice(0, begin, end).select(1, 0)),
                  kOutputBar);
    }
    for (const int segment : {0, 2}) {
        EXPECT_LE(relative_error(out.S_end[segment][0], expected.S_end[segment][0]), kForwardBar);
    }
}

TEST(ForwardKernel, Summaries) {
    const GdnProblem problem =
        make_problem({.offsets = {0, 70, 75, 400}, .group = 3, .log_decay = -0.5});
    const auto reference = [&](const GdnInputs& in) {
        const GdnInputs wide = {.q = in.q.to(at::kDouble),
                                .k = in.k.to(at::kDouble),
                                .v = in.v.to(at::kDouble),
                                .g = in.g.to(at::kDouble),
                                .beta = in.beta.to(at::kDouble)};
        return make_gdn_call(GdnBackend::kReference, wide, problem.offsets, problem.options)
            ->summary();
    };
    const GdnSummary expected = reference(problem.inputs);
    const Summary exact = run_summary(problem, {});
    expect_states_close(exact.S, expected.S, kForwardBar, "S");
    expect_states_close(exact.M.slice(1, 0, 2), expected.M.slice(1, 0, 2), kForwardBar, "M");
    const Summary fast = run_summary(problem, {.seed = 2, .summary_floor = -18.0F});
    expect_states_close(fast.S, expected.S, kForwardBar, "S, truncated");
    expect_states_close(fast.M.slice(1, 0, 2), expected.M.slice(1, 0, 2), kForwardBar,
                        "M, truncated");
    EXPECT_EQ(fast.M[2][2].abs().sum().item<float>(), 0);
}

// Head 2 keeps 1e-14 of its start: of M all bits count, however small it is.
TEST(ForwardKernel, SmallTransitionsAreAsExact) {
    const GdnProblem problem = make_problem({.offsets = {0, 320}, .group = 3, .log_decay = -0.1});
    GdnInputs wide;
    wide.q = problem.inputs.q.to(at::kDouble);
    wide.k = problem.inputs.k.to(at::kDouble);
    wide.v = problem.inputs.v.to(at::kDouble);
    wide.g = problem.inputs.g.to(at::kDouble);
    wide.beta = problem.inputs.beta.to(at::kDouble);
    const Tensor expected =
        make_gdn_call(GdnBackend::kReference, wide, problem.offsets, problem.options)->summary().M;
    const Tensor M = run_summary(problem, {.seed = 3}).M;
    for (std::int64_t head = 0; head < 3; ++head) {
        EXPECT_LE(relative_error(M[0][head], expected[0][head]), kForwardBar) << head;
    }
    EXPECT_LT(expected[0][2].abs().max().item<double>(), 1e-9);
}

TEST(ForwardKernel, LeavesCheckpointsAndTheSameOutputs) {
    const GdnProblem problem =
        make_problem({.offsets = {0, 290, 420}, .group = 2, .log_decay = -0.7});
    const Forward without = run_forward(problem, {.pieces = 2, .may_truncate = true});
    const Forward with = run_forward(problem, {.pieces = 2, .runs = 5, .may_truncate = true});
    EXPECT_TRUE(at::equal(with.o, without.o));
    EXPECT_TRUE(at::equal(with.S_end, without.S_end));
    EXPECT_TRUE(with.checkpoints.isfinite().all().item<bool>());
}

}  // namespace
}  // namespace hybridcp::test
