#include "gdn_cuda/forward_launch.h"

#include <ATen/ATen.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/gdn/cuda/forward.cuh"

namespace hybridcp::test {
namespace {

using namespace gdn::cuda;  // NOLINT(google-build-using-namespace)
using at::Tensor;

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

template <class Config>
Forward forward_with(const GdnProblem& problem, const Run& run) {
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

}  // namespace

Forward run_forward(const GdnProblem& problem, const Run& run) {
    return forward_with<OutputConfig>(problem, run);
}
Forward run_keeping_forward(const GdnProblem& problem, const Run& run) {
    return forward_with<KeepConfig>(problem, run);
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

}  // namespace hybridcp::test
