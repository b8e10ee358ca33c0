// What the forward kernel leaves for backward, kept or made again, under the emulator against the
// formulas in fp64.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "gdn_cuda/forward_launch.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

// What a chunk's backward needs, by the formulas of docs/gdn-cuda.md in fp64.
struct ChunkReference {
    Tensor state, errors, inverse;
};
ChunkReference chunk_reference(const GdnProblem& problem,
                               const Tensor& state,
                               std::int64_t head,
                               std::int64_t begin,
                               std::int64_t end) {
    const auto rows = [&](const Tensor& x, std::int64_t at) {
        return x.slice(0, begin, end).select(1, at).to(at::kDouble);
    };
    const std::int64_t key_head = head / (problem.heads() / problem.key_heads());
    Tensor k = rows(problem.inputs.k, key_head);
    if (problem.options.use_qk_l2norm) {
        k = k * ((k * k).sum(-1, true) + 1e-6).rsqrt();
    }
    const Tensor b = rows(problem.inputs.g, head).cumsum(0).unsqueeze(1);
    const Tensor beta = rows(problem.inputs.beta, head).unsqueeze(1);
    const Tensor gam = (b - b.t()).tril().exp();
    const Tensor lower = (beta * k.matmul(k.t()) * gam).tril(-1);
    ChunkReference result;
    result.state = state;
    result.errors = rows(problem.inputs.v, head) - b.exp() * k.matmul(state);
    result.inverse = at::inverse(at::eye(end - begin, lower.options()) + lower);
    return result;
}

Tensor state_before(const GdnProblem& problem,
                    std::int64_t segment,
                    std::int64_t begin,
                    std::int64_t end) {
    GdnProblem prefix = problem;
    const auto cut = [&](Tensor& x) { x = x.slice(0, begin, end); };
    cut(prefix.inputs.q);
    cut(prefix.inputs.k);
    cut(prefix.inputs.v);
    cut(prefix.inputs.g);
    cut(prefix.inputs.beta);
    prefix.offsets = {0, end - begin};
    if (problem.S_start.defined()) {
        prefix.S_start = problem.S_start.slice(0, segment, segment + 1);
    }
    return reference_forward(prefix).S_end[0];
}

void expect_images(const Images& out, const GdnProblem& problem) {
    std::int64_t chunk = 0;
    for (std::size_t segment = 0; segment + 1 < problem.offsets.size(); ++segment) {
        const std::int64_t begin = problem.offsets[segment], end = problem.offsets[segment + 1];
        for (std::int64_t token = begin; token < end; token += 64, ++chunk) {
            const std::int64_t stop = std::min(token + 64, end), rows = stop - token;
            const Tensor states =
                state_before(problem, static_cast<std::int64_t>(segment), begin, token);
            for (std::int64_t head = 0; head < problem.heads(); ++head) {
                SCOPED_TRACE("chunk " + std::to_string(chunk) + ", head " + std::to_string(head));
                const auto expected = chunk_reference(problem, states[head], head, token, stop);
                const Tensor state = out.states[head][chunk]
                                         .reshape({2, 2, 64, 64})
                                         .permute({1, 3, 0, 2})
                                         .reshape({128, 128});
                const Tensor errors = out.errors.slice(0, token, stop).select(1, head);
                const Tensor inverse = out.inverses[head][chunk].tril();
                EXPECT_LE(relative_error(state, expected.state), kForwardBar);
                EXPECT_LE(relative_error(errors, expected.errors), kForwardBar);
                EXPECT_LE(
                    relative_error(inverse.slice(0, 0, rows).slice(1, 0, rows), expected.inverse),
                    1e-3);
                EXPECT_EQ(relative_error(inverse.slice(0, rows), at::eye(64).slice(0, rows)), 0);
            }
        }
    }
}

void expect_remade(const GdnProblem& problem, const Run& run, const std::string& what) {
    SCOPED_TRACE(what);
    expect_images(run_remake(problem, run), problem);
}

TEST(ForwardImages, RemakesWhatBackwardNeeds) {
    const GdnProblem problem = make_problem({.offsets = {0, 70, 71, 71, 263}, .group = 2});
    for (const std::uint64_t seed : {1, 2, 3}) {
        expect_remade(problem, {.seed = seed}, "seed " + std::to_string(seed));
    }
}

TEST(ForwardImages, RemakesFromCheckpoints) {
    const GdnProblem zero_start = make_problem(
        {.offsets = {0, 500}, .start_states = false, .qk_scale = 3.0, .log_decay = -0.4});
    expect_remade(zero_start, {.pieces = 3, .runs = 4, .may_truncate = true}, "pieces, truncated");
    const GdnProblem slow = make_problem({.offsets = {0, 400}, .log_decay = -0.002});
    expect_remade(slow, {.pieces = 2, .runs = 7, .may_truncate = true}, "pieces from the start");
    // Head 1 does not decay; segments of one run, of two and of three.
    const GdnProblem packed =
        make_problem({.offsets = {0, 40, 40, 240, 350}, .group = 3, .log_decay = -0.7});
    expect_remade(packed, {.runs = 3, .seed = 4}, "packed");
}

// What a run leaves does not depend on where it began: forward and remake do the same sums.
TEST(ForwardImages, RunsAreTheWholeInEveryBit) {
    const GdnProblem problem =
        make_problem({.offsets = {0, 330, 460}, .group = 3, .log_decay = -0.7});
    const Images whole = run_remake(problem, {.seed = 6});
    const Images runs = run_remake(problem, {.runs = 4, .seed = 7});
    EXPECT_TRUE(at::equal(runs.states, whole.states));
    EXPECT_TRUE(at::equal(runs.errors, whole.errors));
}

// Forward leaves it itself, and is otherwise the same.
void expect_kept(const GdnProblem& problem, const Run& run, const std::string& what) {
    SCOPED_TRACE(what);
    const Forward kept = run_keeping_forward(problem, run);
    const Forward plain = run_forward(problem, run);
    EXPECT_TRUE(at::equal(kept.o, plain.o));
    EXPECT_TRUE(
        at::equal(kept.S_end.nan_to_num(), plain.S_end.nan_to_num()));  // of an empty segment
    EXPECT_TRUE(at::equal(kept.k_norms, plain.k_norms));
    expect_images(kept.images, problem);
}

TEST(ForwardImages, KeepsWhatBackwardNeeds) {
    const GdnProblem packed = make_problem({.offsets = {0, 70, 71, 71, 400}, .group = 2});
    for (const std::uint64_t seed : {1, 2, 3}) {
        expect_kept(packed, {.seed = seed}, "packed");
    }
    const GdnProblem cut = make_problem(
        {.offsets = {0, 500}, .start_states = false, .qk_scale = 3.0, .log_decay = -0.4});
    expect_kept(cut, {.pieces = 3, .runs = 4, .may_truncate = true, .seed = 4}, "pieces");
}

// Forward keeps the last chunks of each run, another share in each piece if the head remembers all
// of its segment (head 1), and remaking adds the rest.
void expect_kept_and_remade(const ProblemOptions& options, int kept, int pieces) {
    SCOPED_TRACE(std::to_string(kept) + " of each run, " + std::to_string(pieces) + " pieces");
    const GdnProblem problem = make_problem(options);
    const hybridcp::test::Run run = {.pieces = pieces,
                                     .runs = 2,
                                     .kept = kept,
                                     .may_truncate = true,
                                     .seed = static_cast<std::uint64_t>(kept + pieces)};
    const Images images = run_keeping_and_remake(problem, run);
    if (pieces == 1) {
        EXPECT_TRUE(at::equal(images.states, run_remake(problem, {.seed = 8}).states));
    }
    expect_images(images, problem);
}
TEST(ForwardImages, KeptAndRemadeAreTheWhole) {
    // Key heads of all classes, and value heads of one key head.
    const ProblemOptions classes = {.offsets = {0, 520, 560}, .key_heads = 5, .log_decay = -0.7};
    const ProblemOptions group = {.offsets = {0, 600, 640, 910}, .group = 4, .log_decay = -0.7};
    for (const int pieces : {1, 2, 3}) {
        expect_kept_and_remade(classes, 2, pieces);
        expect_kept_and_remade(group, pieces, pieces);
    }
}

}  // namespace
}  // namespace hybridcp::test
