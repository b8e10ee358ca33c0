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
    std::vector<std::int32_t> first_checkpoints;
    std::vector<gdn::cuda::Run> runs;
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
    launch.tables = make_tables(problem.offsets, run.pieces);
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

// Heads of all classes begin somewhere else if anything is kept.
RunCut cut_of(const GdnProblem& problem, const Run& run, bool keeping) {
    std::int32_t longest = 1;
    for (const Piece& segment : make_tables(problem.offsets).pieces) {
        longest = std::max(longest, segment.chunks);
    }
    const std::int32_t length = (longest + run.runs - 1) / run.runs;
    return {length, !keeping ? 0 : run.kept > 0 ? run.kept : length};
}
std::int32_t checkpoints_of(const RunCut& cut, const Piece& segment) {
    return cut.run_from(segment.chunks, kHeadClasses - 1) - 1;
}
Tensor new_checkpoints(const GdnProblem& problem, const RunCut& cut) {
    std::int64_t count = 0;
    for (const Piece& segment : make_tables(problem.offsets).pieces) {
        count += checkpoints_of(cut, segment);
    }
    return poisoned({problem.heads(), count, kCheckpointFloats}, at::kFloat);
}
void use_checkpoints(Launch& launch,
                     const GdnProblem& problem,
                     const RunCut& cut,
                     const Tensor& data) {
    launch.first_checkpoints.assign(static_cast<std::size_t>(problem.segments()), 0);
    std::int32_t checkpoints = 0;
    for (const Piece& segment : make_tables(problem.offsets).pieces) {
        launch.first_checkpoints[static_cast<std::size_t>(segment.segment)] = checkpoints;
        checkpoints += checkpoints_of(cut, segment);
        for (std::int32_t head_class = 0; head_class < kHeadClasses; ++head_class) {
            for (std::int32_t i = 0; i < cut.run_from(segment.chunks, head_class); ++i) {
                launch.runs.push_back(
                    {segment.segment, segment.first_chunk, segment.chunks, i, head_class});
            }
        }
    }
    launch.params.checkpoints = {.cut = cut,
                                 .first = launch.first_checkpoints.data(),
                                 .data = data.data_ptr<float>(),
                                 .of_head = checkpoints,
                                 .first_key_head = 0};
    launch.options.buffers.push_back(buffer(launch.first_checkpoints));
    launch.options.buffers.push_back(buffer(data));
}

// As the kernels leave them: E in its three places, and which chunks forward kept.
struct RawImages {
    Tensor states, errors[kErrorPlaces], inverses, kept;
};
RawImages new_images(const GdnProblem& problem, std::int64_t chunks) {
    const std::int64_t heads = problem.heads(), key_heads = problem.key_heads();
    constexpr auto kOperand = kFp16 ? at::kHalf : at::kBFloat16;
    const auto rows = [&](std::int64_t of) {
        return poisoned({problem.tokens(), of, 128}, kOperand);
    };
    return {.states = poisoned({heads, chunks, 4, 64, 64}, kOperand),
            .errors = {rows(key_heads), rows(key_heads),
                       rows(std::max<std::int64_t>(heads - 2 * key_heads, 1))},
            .inverses = poisoned({heads, chunks, kInverseBytes}, at::kByte),
            .kept = poisoned({heads, chunks}, at::kByte)};
}
void use_images(Launch& launch, const RawImages& images) {
    ForwardParams& p = launch.params;
    p.states = reinterpret_cast<std::uint16_t*>(writable(launch, images.states));
    for (int i = 0; i < kErrorPlaces; ++i) {
        const Tensor& rows = images.errors[i];
        p.errors[i] = {.map = tensor_map(rows),
                       .data = reinterpret_cast<std::uint16_t*>(writable(launch, rows)),
                       .token_stride = rows.stride(0),
                       .head_stride = rows.stride(1)};
    }
    p.inverses = reinterpret_cast<std::uint16_t*>(writable(launch, images.inverses));
    p.kept = reinterpret_cast<std::uint8_t*>(writable(launch, images.kept));
}
Tensor errors_of(const RawImages& images, const GdnProblem& problem) {
    std::vector<Tensor> heads;
    const auto group = static_cast<std::int32_t>(problem.heads() / problem.key_heads());
    for (std::int32_t head = 0; head < problem.heads(); ++head) {
        const ErrorPlace place(head / group, head % group, group);
        heads.push_back(images.errors[place.index].select(1, place.head));
    }
    return at::stack(heads, 1).to(at::kFloat);
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
Images decoded(const RawImages& images, const GdnProblem& problem, const Launch& launch) {
    Images out = {.states = unswizzled(images.states).to(at::kFloat),
                  .errors = errors_of(images, problem),
                  .inverses = decoded_inverses(images.inverses)};
    for (std::int64_t head = 0; kFp16 && head < out.states.size(0); ++head) {
        const int exponent =
            exponent_of(launch.largest[static_cast<std::size_t>(head)], kRoomOfValues);
        out.states.select(0, head).mul_(std::exp2(exponent));
        out.errors.select(1, head).mul_(std::exp2(exponent));
    }
    return out;
}

struct Outputs {
    Forward forward;
    RawImages images;
};
template <class Config>
Outputs forward_with(const GdnProblem& problem, const Run& run) {
    Launch launch = make_launch<Config>(problem, run);
    ForwardParams& p = launch.params;
    const std::int64_t heads = problem.heads();
    const RunCut cut = cut_of(problem, run, Config::kKeep);
    Outputs result;
    Forward& out = result.forward;
    out.o = poisoned({problem.tokens(), heads, 128}, at::kBFloat16);
    out.S_end = poisoned({problem.segments(), heads, 128, 128}, at::kFloat);
    out.q_norms = poisoned({problem.key_heads(), problem.tokens()}, at::kFloat);
    out.k_norms = poisoned({problem.key_heads(), problem.tokens()}, at::kFloat);
    out.checkpoints = new_checkpoints(problem, cut);
    use_checkpoints(launch, problem, cut, out.checkpoints);
    p.q = tensor_map(problem.inputs.q);
    launch.options.buffers.push_back(buffer(problem.inputs.q, false));
    p.o = {.map = tensor_map(out.o),
           .data = reinterpret_cast<std::uint16_t*>(writable(launch, out.o)),
           .token_stride = out.o.stride(0),
           .head_stride = out.o.stride(1)};
    p.end_states = writable(launch, out.S_end);
    p.q_norms = writable(launch, out.q_norms);
    p.k_norms = writable(launch, out.k_norms);
    if constexpr (Config::kKeep) {
        result.images = new_images(problem, p.shape.num_chunks);
        use_images(launch, result.images);
    }
    start<Config>(launch);
    if constexpr (Config::kKeep) {
        out.images = decoded(result.images, problem, launch);
    }
    return result;
}

Images remake_into(const GdnProblem& problem,
                   const Run& run,
                   const Tensor& checkpoints,
                   const RawImages& images,
                   bool after_keeping) {
    Launch launch = make_launch<RemakeConfig>(problem, run);
    use_checkpoints(launch, problem, cut_of(problem, run, after_keeping), checkpoints);
    launch.params.runs = launch.runs.data();
    launch.params.num_runs = static_cast<std::int32_t>(launch.runs.size());
    launch.options.buffers.push_back(buffer(launch.runs));
    const Shape& shape = launch.params.shape;
    const std::int32_t clusters =
        launch.params.num_runs * key_heads_of_class(shape) * shape.group();
    launch.options.blocks = static_cast<std::uint32_t>(2 * clusters);
    use_images(launch, images);
    if (!after_keeping) {
        launch.params.kept = nullptr;
    }
    start<RemakeConfig>(launch);
    return decoded(images, problem, launch);
}

}  // namespace

Forward run_forward(const GdnProblem& problem, const Run& run) {
    return forward_with<OutputConfig>(problem, run).forward;
}
Forward run_keeping_forward(const GdnProblem& problem, const Run& run) {
    return forward_with<KeepConfig>(problem, run).forward;
}

Images run_remake(const GdnProblem& problem, const Run& run) {
    const auto chunks = static_cast<std::int64_t>(make_tables(problem.offsets).chunks.size());
    return remake_into(problem, run, run_forward(problem, run).checkpoints,
                       new_images(problem, chunks), false);
}
Images run_keeping_and_remake(const GdnProblem& problem, const Run& run) {
    const Outputs kept = forward_with<KeepConfig>(problem, run);
    return remake_into(problem, run, kept.forward.checkpoints, kept.images, true);
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
