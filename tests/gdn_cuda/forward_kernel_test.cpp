// The forward kernel under the emulator against the fp64 recurrence.

#include "kernels/gdn/cuda/forward.cuh"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <utility>

#include "gdn_cuda/operands.h"
#include "gdn_cuda/support.h"

namespace hybridcp::test {
namespace {

using namespace gdn::cuda;  // NOLINT(google-build-using-namespace)
using at::Tensor;

// Operands in fp16 have 11 bits for 8; o is rounded to bf16.
constexpr double kBar = kFp16 ? 1e-3 : 5e-3, kOutputBar = kFp16 ? 2.5e-3 : 5e-3;

struct Run {
    int pieces = 1;
    int runs = 1;
    bool may_truncate = false;
    std::uint64_t seed = 1;
    float summary_floor = -std::numeric_limits<float>::infinity();
};

// Inputs of a launch and the tables they need.
struct Launch {
    ForwardParams params{};
    Tables tables;
    std::vector<SegmentRuns> segment_runs;
    std::vector<std::uint32_t> largest;
    simt::LaunchOptions options;
};

// Of v and start states, as bits.
std::vector<std::uint32_t> largest_of(const GdnProblem& problem) {
    std::vector<std::uint32_t> bits;
    for (std::int64_t head = 0; head < problem.heads(); ++head) {
        auto most = problem.inputs.v.select(1, head).to(at::kFloat).abs().nan_to_num().max();
        if (problem.S_start.defined()) {
            most = at::maximum(most, problem.S_start.select(1, head).abs().nan_to_num().max());
        }
        bits.push_back(std::bit_cast<std::uint32_t>(most.item<float>()));
    }
    return bits;
}

template <class Config>
Launch make_launch(const GdnProblem& problem, const Run& run) {
    Launch launch;
    launch.tables = make_tables(problem.offsets, Config::kRemake ? run.runs : run.pieces);
    ForwardParams& p = launch.params;
    p.k = tensor_map(problem.inputs.k);
    p.v = tensor_map(problem.inputs.v);
    p.gates = gates_of(problem);
    p.shape = shape_of(problem, launch.tables);
    p.num_pieces = static_cast<std::int32_t>(launch.tables.pieces.size());
    p.may_truncate = run.may_truncate;
    p.summary_floor = run.summary_floor;
    launch.largest = largest_of(problem);
    simt::LaunchOptions& options = launch.options;
    options = {.blocks = static_cast<std::uint32_t>(2 * problem.heads() * p.num_pieces),
               .threads = Config::kThreads,
               .cluster = Config::kCluster,
               .shared_bytes = Config::kSharedBytes,
               .seed = run.seed,
               .buffers = {buffer(problem.inputs.k, false), buffer(problem.inputs.v, false),
                           buffer(problem.inputs.g, false), buffer(problem.inputs.beta, false)}};
    if (problem.S_start.defined() && !Config::kSummary) {
        p.start_states = problem.S_start.const_data_ptr<float>();
        options.buffers.push_back(buffer(problem.S_start, false));
    }
    return launch;
}

template <class Config>
void start(Launch& launch) {
    launch.params.chunks = launch.tables.chunks.data();
    launch.params.pieces = launch.tables.pieces.data();
    launch.params.largest = launch.largest.data();
    launch.options.buffers.push_back(buffer(launch.largest));
    launch.options.buffers.push_back(buffer(launch.tables.chunks));
    launch.options.buffers.push_back(buffer(launch.tables.pieces));
    simt::launch(launch.options, [&] { forward_kernel<Config>(launch.params); });
}

// A tensor for the kernel to write.
float* writable(Launch& launch, const Tensor& x) {
    launch.options.buffers.push_back(buffer(x));
    return static_cast<float*>(x.data_ptr());
}

// A segment's runs are cut as make_tables cuts pieces.
void use_checkpoints(Launch& launch, const GdnProblem& problem, int runs, const Tensor& data) {
    launch.segment_runs.assign(static_cast<std::size_t>(problem.segments()), {1, 0});
    std::int32_t checkpoints = 0;
    for (const Piece& run : make_tables(problem.offsets, runs).pieces) {
        if (run.index == 0) {
            launch.segment_runs[static_cast<std::size_t>(run.segment)] = {run.pieces, checkpoints};
            checkpoints += run.pieces - 1;
        }
    }
    launch.params.checkpoints = {.segments = launch.segment_runs.data(),
                                 .data = data.data_ptr<float>(),
                                 .of_head = checkpoints};
    launch.options.buffers.push_back(buffer(launch.segment_runs));
}
Tensor new_checkpoints(const GdnProblem& problem, int runs) {
    const auto all = static_cast<std::int64_t>(make_tables(problem.offsets, runs).pieces.size());
    const auto one_each = static_cast<std::int64_t>(make_tables(problem.offsets, 1).pieces.size());
    return poisoned({problem.heads(), all - one_each, kCheckpointFloats}, at::kFloat);
}

/// H, E and T: [heads, chunks, ...], once `decoded` in fp32 and T in fp64.
struct Images {
    Tensor states, errors, inverses;
};
Images use_images(Launch& launch, const GdnProblem& problem) {
    ForwardParams& p = launch.params;
    const std::int64_t heads = problem.heads(), chunks = p.shape.num_chunks;
    constexpr auto kOperand = kFp16 ? at::kHalf : at::kBFloat16;
    Images images = {.states = poisoned({heads, chunks, 4, 64, 64}, kOperand),
                     .errors = poisoned({heads, chunks, 2, 64, 64}, kOperand),
                     .inverses = poisoned({heads, chunks, kInverseBytes}, at::kByte)};
    p.states = reinterpret_cast<std::uint16_t*>(writable(launch, images.states));
    p.errors = reinterpret_cast<std::uint16_t*>(writable(launch, images.errors));
    p.inverses = reinterpret_cast<std::uint16_t*>(writable(launch, images.inverses));
    return images;
}
Tensor decoded_inverses(const Tensor& images) {
    Tensor all = at::zeros({images.size(0), images.size(1), 64, 64}, at::kHalf);
    for (std::int64_t i = 0; i < images.size(0) * images.size(1); ++i) {
        const auto* from = images.const_data_ptr<std::uint8_t>() + i * kInverseBytes;
        auto* to = static_cast<std::uint8_t*>(all.data_ptr()) + i * 64 * 64 * 2;
        for (std::uint32_t row = 0; row < 64; ++row) {
            for (std::uint32_t column = 0; column < 16 * (row / 16 + 1); ++column) {
                std::memcpy(to + std::size_t{row * 64 + column} * 2, from + inverse_at(row, column),
                            2);
            }
        }
    }
    return all.to(at::kDouble);
}
Images decoded(const Images& images, const Launch& launch) {
    Images out = {.states = unswizzled(images.states).to(at::kFloat),
                  .errors = unswizzled(images.errors).to(at::kFloat),
                  .inverses = decoded_inverses(images.inverses)};
    for (std::int64_t head = 0; kFp16 && head < out.states.size(0); ++head) {
        const int exponent = exponent_of(launch.largest[static_cast<std::size_t>(head)]);
        for (Tensor* x : {&out.states, &out.errors}) {
            x->select(0, head).mul_(std::exp2(exponent));
        }
    }
    return out;
}

struct Forward {
    Tensor o, S_end, q_norms, k_norms, checkpoints;
    Images images;  // of KeepConfig
};

template <class Config = OutputConfig>
Forward run_forward(const GdnProblem& problem, const Run& run) {
    Launch launch = make_launch<Config>(problem, run);
    ForwardParams& p = launch.params;
    const std::int64_t heads = problem.heads();
    Forward out = {
        .o = poisoned({problem.tokens(), heads, 128}, at::kBFloat16),
        .S_end = poisoned({problem.segments(), heads, 128, 128}, at::kFloat),
        .q_norms = poisoned({problem.key_heads(), problem.tokens()}, at::kFloat),
        .k_norms = poisoned({problem.key_heads(), problem.tokens()}, at::kFloat),
        .checkpoints = new_checkpoints(problem, run.runs),
        .images = {},
    };
    if (run.runs > 1) {
        use_checkpoints(launch, problem, run.runs, out.checkpoints);
        launch.options.buffers.push_back(buffer(out.checkpoints));
    }
    p.q = tensor_map(problem.inputs.q);
    launch.options.buffers.push_back(buffer(problem.inputs.q, false));
    p.o = tensor_map(out.o);
    p.o_rows = reinterpret_cast<std::uint16_t*>(writable(launch, out.o));
    p.o_token_stride = out.o.stride(0);
    p.o_head_stride = out.o.stride(1);
    p.end_states = writable(launch, out.S_end);
    p.q_norms = writable(launch, out.q_norms);
    p.k_norms = writable(launch, out.k_norms);
    if constexpr (Config::kKeep) {
        out.images = use_images(launch, problem);
    }
    start<Config>(launch);
    if constexpr (Config::kKeep) {
        out.images = decoded(out.images, launch);
    }
    return out;
}

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
                                expected.S_end.slice(0, segment, segment + 1), kBar, "S_end");
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
        EXPECT_LE(relative_error(out.S_end[segment][0], expected.S_end[segment][0]), kBar);
    }
}

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

Images run_remake(const GdnProblem& problem, const Run& run) {
    Launch launch = make_launch<RemakeConfig>(problem, run);
    const Tensor checkpoints = run.runs > 1 ? run_forward(problem, run).checkpoints : Tensor();
    if (run.runs > 1) {
        use_checkpoints(launch, problem, run.runs, checkpoints);
        launch.options.buffers.push_back(buffer(checkpoints, false));
    }
    const Images images = use_images(launch, problem);
    start<RemakeConfig>(launch);
    return decoded(images, launch);
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
                const Tensor errors = out.errors[head][chunk].permute({1, 0, 2}).reshape({64, 128});
                const Tensor inverse = out.inverses[head][chunk].tril();
                EXPECT_LE(relative_error(state, expected.state), kBar);
                EXPECT_LE(relative_error(errors.slice(0, 0, rows), expected.errors), kBar);
                EXPECT_EQ(errors.slice(0, rows).to(at::kFloat).abs().sum().item<float>(), 0);
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

TEST(ForwardKernel, RemakesWhatBackwardNeeds) {
    const GdnProblem problem = make_problem({.offsets = {0, 70, 71, 71, 263}, .group = 2});
    for (const std::uint64_t seed : {1, 2, 3}) {
        expect_remade(problem, {.seed = seed}, "seed " + std::to_string(seed));
    }
}

TEST(ForwardKernel, RemakesFromCheckpoints) {
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
TEST(ForwardKernel, RunsAreTheWholeInEveryBit) {
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
    const Forward kept = run_forward<KeepConfig>(problem, run);
    const Forward plain = run_forward(problem, run);
    EXPECT_TRUE(at::equal(kept.o, plain.o));
    EXPECT_TRUE(
        at::equal(kept.S_end.nan_to_num(), plain.S_end.nan_to_num()));  // of an empty segment
    EXPECT_TRUE(at::equal(kept.k_norms, plain.k_norms));
    expect_images(kept.images, problem);
}

TEST(ForwardKernel, KeepsWhatBackwardNeeds) {
    const GdnProblem packed = make_problem({.offsets = {0, 70, 71, 71, 400}, .group = 2});
    for (const std::uint64_t seed : {1, 2, 3}) {
        expect_kept(packed, {.seed = seed}, "packed");
    }
    const GdnProblem cut = make_problem(
        {.offsets = {0, 500}, .start_states = false, .qk_scale = 3.0, .log_decay = -0.4});
    expect_kept(cut, {.pieces = 3, .runs = 4, .may_truncate = true, .seed = 4}, "pieces");
}

struct Summary {
    Tensor S, M;
};
Summary run_summary(const GdnProblem& problem, const Run& run) {
    Launch launch = make_launch<SummaryConfig>(problem, run);
    ForwardParams& p = launch.params;
    const std::vector<std::int64_t> sizes = {problem.segments(), problem.heads(), 128, 128};
    const Summary out = {.S = poisoned(sizes, at::kFloat), .M = poisoned(sizes, at::kFloat)};
    p.end_states = writable(launch, out.S);
    p.transitions = writable(launch, out.M);
    launch.options.blocks *= 2;
    start<SummaryConfig>(launch);
    return out;
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
    expect_states_close(exact.S, expected.S, kBar, "S");
    expect_states_close(exact.M.slice(1, 0, 2), expected.M.slice(1, 0, 2), kBar, "M");
    const Summary fast = run_summary(problem, {.seed = 2, .summary_floor = -18.0F});
    expect_states_close(fast.S, expected.S, kBar, "S, truncated");
    expect_states_close(fast.M.slice(1, 0, 2), expected.M.slice(1, 0, 2), kBar, "M, truncated");
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
        EXPECT_LE(relative_error(M[0][head], expected[0][head]), kBar) << head;
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
