// Times each Gated DeltaNet kernel for Hopper by itself, without torch: medians with the
// second-level cache overwritten between runs, whether repeats are equal in every bit, and the mean
// size of each output (to compare two versions of a kernel; correctness is tests/gdn_cuda). On a
// GPU only; for work on a kernel, `hcp bench gdn --device cuda` is what users see.
//   nvcc="nvcc -O3 -std=c++20 --expt-relaxed-constexpr -lineinfo -I src -cudart static
//       --generate-code=arch=compute_90a,code=sm_90a"
//   for o in bf16 fp16; do $nvcc -DHCP_OPERANDS=$o -c -o $o.o src/kernels/gdn/cuda/launch.cu; done
//   $nvcc -o gdn_cuda_kernels bench/gdn_cuda_kernels.cu bf16.o fp16.o
//       src/kernels/gdn/cuda/host_tables.cpp src/kernels/gdn/cuda/device_traits.cpp
//   ./gdn_cuda_kernels [KEY_HEADS VALUE_HEADS TOKENS ls16|zero25|none [REPEATS [KERNELS
//   [bf16|fp16 [SHARE that `keeping` keeps]]]]]
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernels/gdn/cuda/host_tables.h"
#include "kernels/gdn/cuda/launch.h"

namespace {

using namespace hybridcp::gdn;        // NOLINT(google-build-using-namespace): a program of one file
using namespace hybridcp::gdn::cuda;  // NOLINT(google-build-using-namespace)

void check(const char* error, const char* what) {
    if (error != nullptr) {
        std::fprintf(stderr, "%s: %s\n", what, error);
        std::exit(1);
    }
}
void check(cudaError_t error, const char* what) {
    check(error == cudaSuccess ? nullptr : cudaGetErrorString(error), what);
}

/// Memory of the device, counted in bytes.
struct Memory {
    char* data = nullptr;
    size_t bytes = 0;
    explicit Memory(size_t size) : bytes(size) { check(cudaMalloc(&data, size), "cudaMalloc"); }
    template <class T>
    explicit Memory(const std::vector<T>& host) : Memory(host.size() * sizeof(T)) {
        check(cudaMemcpy(data, host.data(), bytes, cudaMemcpyHostToDevice), "copy");
    }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data);
    }
};

std::vector<__nv_bfloat16> normal_bf16(size_t count, unsigned seed) {
    // A period prime to all strides: rows differ, and large tensors are made quickly.
    constexpr size_t kPeriod = 1000003;
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    std::vector<__nv_bfloat16> some(std::min(count, kPeriod)), all(count);
    for (auto& x : some) {
        x = __float2bfloat16(normal(engine));
    }
    for (size_t i = 0; i < count; ++i) {
        all[i] = some[i % kPeriod];
    }
    return all;
}

std::vector<float> log_gates(int tokens, int heads, const std::string& kind) {
    std::mt19937 engine(5);
    std::normal_distribution<float> normal;
    std::vector<float> g(size_t(tokens) * heads);
    for (size_t i = 0; i < g.size(); ++i) {
        const int head = static_cast<int>(i % heads);
        const bool keeps = kind == "none" || (kind == "zero25" && head % 4 == 0);
        g[i] = keeps ? 0.0F : -std::log1p(std::exp(-normal(engine))) / 16;
    }
    return g;
}

struct Timed {
    std::string name;
    std::function<const char*()> launch;
    std::vector<std::pair<std::string, const Memory*>> outputs;
    std::function<const char*()> prepare = [] { return nullptr; };  // not timed
};

/// Sums of bits (order does not matter) and of sizes.
template <class T>
__global__ void digest(
    const T* data, size_t count, bool is_bf16, unsigned long long* bits, double* size) {
    unsigned long long sum = 0;
    double total = 0;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count;
         i += size_t(gridDim.x) * blockDim.x) {
        const unsigned long long word = data[i];
        sum += (word + 0x9e3779b97f4a7c15ULL) * (2 * i + 1);
        const unsigned wide = is_bf16 ? unsigned(word) << 16 : unsigned(word);
        total += fabsf(__uint_as_float(wide));
    }
    atomicAdd(bits, sum);
    atomicAdd(size, total);
}

struct Digest {
    unsigned long long bits;
    double mean;
};
Digest digest_of(const std::string& name, const Memory& memory) {
    static const Memory result(16);
    check(cudaMemset(result.data, 0, 16), "memset");
    const bool is_float = name[0] == '.';  // names of fp32 outputs begin with a dot
    const size_t count = memory.bytes / (is_float ? 4 : 2);
    auto* bits = result.as<unsigned long long>();
    auto* size = reinterpret_cast<double*>(result.data + 8);
    if (is_float) {
        digest<<<528, 256>>>(memory.as<unsigned>(), count, false, bits, size);
    } else {
        digest<<<528, 256>>>(memory.as<unsigned short>(), count, true, bits, size);
    }
    unsigned long long host_bits = 0;
    double host_size = 0;
    check(cudaMemcpy(&host_bits, bits, 8, cudaMemcpyDeviceToHost), "digest");
    check(cudaMemcpy(&host_size, size, 8, cudaMemcpyDeviceToHost), "digest");
    return {host_bits, host_size / static_cast<double>(count)};
}

void measure(const Timed& run, int repeats, const Memory& flush) {
    cudaEvent_t begin = nullptr, end = nullptr;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    std::vector<float> times;
    std::map<std::string, unsigned long long> first;
    int unequal = 0;
    std::string sizes;
    for (int i = 0; i < repeats + 3; ++i) {
        check(run.prepare(), "what comes before");
        check(cudaMemsetAsync(flush.data, i, flush.bytes), "flush");
        check(cudaEventRecord(begin), "event");
        check(run.launch(), run.name.c_str());
        check(cudaEventRecord(end), "event");
        check(cudaEventSynchronize(end), run.name.c_str());
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin, end), "event");
        if (i >= 3) {
            times.push_back(ms);
        }
        bool differs = false;
        for (const auto& [name, memory] : run.outputs) {
            const Digest found = digest_of(name, *memory);
            if (i == 0) {
                first[name] = found.bits;
                char text[64];
                std::snprintf(text, sizeof text, " %s %.6g", name.c_str(), found.mean);
                sizes += text;
            }
            differs |= first[name] != found.bits;
        }
        unequal += differs ? 1 : 0;
    }
    std::sort(times.begin(), times.end());
    std::printf("%-17s %.3f ms (min %.3f max %.3f)  %s %s\n", run.name.c_str(),
                times[times.size() / 2], times.front(), times.back(),
                unequal == 0 ? "equal" : "DIFFERS", sizes.c_str());
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    const int key_heads = argc > 1 ? std::atoi(argv[1]) : 16,
              value_heads = argc > 2 ? std::atoi(argv[2]) : 32;
    const int tokens = argc > 3 ? std::atoi(argv[3]) : 32768;
    const std::string gates = argc > 4 ? argv[4] : "ls16", only = argc > 6 ? argv[6] : "";
    const int repeats = argc > 5 ? std::atoi(argv[5]) : 30;
    const double share = argc > 8 ? std::atof(argv[8]) : 1.0;
    const bool in_fp16 = argc > 7 && argv[7] == std::string("fp16");
    const Launches& kernels = in_fp16 ? fp16::launches() : bf16::launches();
    DeviceTraits traits{};
    check(read_device_traits(0, traits), "device");
    // Summaries in parts, however few tokens, so that the sanitizer sees them joined.
    const int64_t chunks_of_two =
        std::min(kChunksOfTwoSummaryParts, (tokens + kChunkTokens - 1) / kChunkTokens);
    const HostTables host = make_host_tables({0, tokens}, value_heads, traits.multiprocessors,
                                             chunks_of_two),
                     kept_host = make_host_tables({0, tokens}, value_heads, traits.multiprocessors,
                                                  chunks_of_two, share);
    const auto num_chunks = static_cast<int32_t>(host.chunks.size());
    const size_t key_elements = size_t(tokens) * key_heads * kHeadDim,
                 value_elements = size_t(tokens) * value_heads * kHeadDim;
    const size_t images = size_t(value_heads) * num_chunks,
                 state = size_t(value_heads) * kHeadDim * kHeadDim;

    const Memory q(normal_bf16(key_elements, 1)), k(normal_bf16(key_elements, 2)),
        v(normal_bf16(value_elements, 3));
    const Memory d_o(normal_bf16(value_elements, 4)), g(log_gates(tokens, value_heads, gates));
    std::vector<__nv_bfloat16> strengths = normal_bf16(size_t(tokens) * value_heads, 6);
    for (auto& x : strengths) {
        x = __float2bfloat16(1 / (1 + std::exp(-__bfloat162float(x))));
    }
    const Memory beta(strengths), chunks(host.chunks), pieces(host.pieces),
        parts(host.summary_parts), joins(host.joins), first_checkpoints(host.first_checkpoints),
        runs_of_all(host.runs), runs_of_rest(kept_host.runs);
    const Memory kept(size_t(4) * kCheckpointFloats * value_heads * host.num_checkpoints + 16);
    const Memory o(2 * value_elements), end(4 * state), q_norms(4 * size_t(tokens) * key_heads),
        k_norms(q_norms.bytes);
    const Memory states(images * kStateBytes), inverses(images * kInverseBytes),
        kept_chunks(images);
    const Memory d_states(images * kStateBytes), d_start(4 * state);
    // E and Z lie in dq, dk and dv, and so must be made before each gradients kernel.
    const Memory dq(2 * key_elements), dk(2 * key_elements), dv(2 * value_elements);
    const Memory other_errors(std::max<size_t>(2 * value_elements, 4 * key_elements) -
                              4 * key_elements + 16);
    const Memory dg(4 * size_t(tokens) * value_heads), dbeta(dg.bytes);
    const Memory S(4 * state * size_t(host.num_slots)), M(S.bytes), dS(S.bytes);
    const Memory largest(4 * size_t(value_heads)), largest_gradients(largest.bytes);
    check(cudaMemset(largest.data, 0, largest.bytes), "memset");
    check(cudaMemset(largest_gradients.data, 0, largest.bytes), "memset");
    const Memory flush(size_t(256) << 20);

    const auto rows = [](const Memory& x, int heads) {
        return RowsView{x.data, int64_t{heads} * kHeadDim, kHeadDim};
    };
    const CallView call = {
        .q = rows(q, key_heads),
        .k = rows(k, key_heads),
        .v = rows(v, value_heads),
        .gates = {g.as<float>(), value_heads, 1, beta.data, value_heads, 1, true},
        .shape = {tokens, key_heads, value_heads, num_chunks, 0.08838834764F, true},
        .chunks = chunks.as<Chunk>(),
        .pieces = pieces.as<Piece>(),
        .num_pieces = static_cast<int32_t>(host.pieces.size()),
        .may_truncate = true,
        .stream = nullptr,
        .largest = largest.as<uint32_t>()};
    CallView parts_call = call;
    parts_call.pieces = parts.as<Piece>();
    parts_call.num_pieces = static_cast<int32_t>(host.summary_parts.size());
    const Checkpoints checkpoints = {host.cut, first_checkpoints.as<int32_t>(), kept.as<float>(),
                                     host.num_checkpoints, 0};
    const Memory kept_states(
        size_t(4) * kCheckpointFloats * value_heads * kept_host.num_checkpoints + 16);
    const Checkpoints kept_checkpoints = {kept_host.cut, first_checkpoints.as<int32_t>(),
                                          kept_states.as<float>(), kept_host.num_checkpoints, 0};
    const ForwardView forward = {rows(o, value_heads), nullptr,
                                 end.as<float>(),      q_norms.as<float>(),
                                 k_norms.as<float>(),  checkpoints};
    const int others = key_heads * (value_heads / key_heads - 2);
    const RowsView no_rows{};
    const ForwardImages images_of_all = {
        states.as<uint8_t>(),
        {rows(dq, key_heads), value_heads > key_heads ? rows(dk, key_heads) : no_rows,
         others > 0 ? rows(other_errors, others) : no_rows},
        inverses.as<uint8_t>(),
        kept_chunks.as<uint8_t>()};
    ForwardView keeping = forward;
    keeping.images = images_of_all;
    keeping.checkpoints = kept_checkpoints;
    const RemakeView rest = {runs_of_rest.as<Run>(), static_cast<int32_t>(kept_host.runs.size()),
                             nullptr, kept_checkpoints, images_of_all};
    const MagnitudesView of_values = {rows(v, value_heads), nullptr, largest.as<uint32_t>()};
    const MagnitudesView of_gradients = {rows(d_o, value_heads), nullptr,
                                         largest_gradients.as<uint32_t>()};
    RemakeView remake = {runs_of_all.as<Run>(), static_cast<int32_t>(host.runs.size()), nullptr,
                         checkpoints, images_of_all};
    remake.images.kept = nullptr;
    StateGradientView walk{};
    walk.d_o = rows(d_o, value_heads);
    walk.q_norms = q_norms.as<float>();
    walk.k_norms = k_norms.as<float>();
    walk.inverses = inverses.as<uint8_t>();
    walk.largest = of_gradients.largest;
    walk.d_start = d_start.as<float>();
    StateGradientView summary_walk = walk;
    summary_walk.d_start = dS.as<float>();
    summary_walk.summary_floor = -25.0F;
    walk.d_states = d_states.as<uint8_t>();
    walk.d_new_values = rows(dv, value_heads);
    const Memory progress(4 * (images + 1));
    walk.progress = {progress.as<uint32_t>(), progress.as<uint32_t>() + 1};
    const GradientsView gradients = {
        walk.d_o,       walk.q_norms,      walk.k_norms, images_of_all, walk.d_states,
        walk.progress,  walk.largest,      dq.data,      dk.data,       walk.d_new_values,
        dg.as<float>(), dbeta.as<float>(), value_heads};
    const SummaryView summary = {S.as<float>(), M.as<float>(), -25.0F};
    const auto num_joins = static_cast<int32_t>(host.joins.size());
    const JoinView join = {joins.as<Join>(), num_joins,     M.as<float>(),
                           S.as<float>(),    M.as<float>(), false};
    const JoinView join_gradients = {joins.as<Join>(), num_joins, M.as<float>(),
                                     dS.as<float>(),   nullptr,   true};
    const auto make_rows = [&] {
        const char* errors[] = {kernels.remake(call, remake), kernels.state_gradient(call, walk)};
        return *std::max_element(std::begin(errors), std::end(errors));
    };
    const std::vector<Timed> runs = {
        {"value_sizes", [&] { return kernels.magnitudes(call, of_values); }, {{".V", &largest}}},
        {"forward", [&] { return kernels.forward(call, forward); }, {{"o", &o}, {".end", &end}}},
        {"keeping", [&] { return kernels.forward(call, keeping); }, {{"o", &o}, {".end", &end}}},
        {"gradient_sizes",
         [&] { return kernels.magnitudes(call, of_gradients); },
         {{".dO", &largest_gradients}}},
        {"remake",
         [&] { return kernels.remake(call, remake); },
         {{"H", &states}, {"E0", &dq}, {"E1", &dk}}},
        {"rest",
         [&] { return kernels.remake(call, rest); },
         {{"H", &states}, {"E0", &dq}, {"E1", &dk}},
         [&] { return kernels.forward(call, keeping); }},
        {"state_gradient",
         [&] { return kernels.state_gradient(call, walk); },
         {{"dH", &d_states}, {"Z", &dv}, {".d_start", &d_start}}},
        {"gradients",
         [&] { return kernels.gradients(call, gradients); },
         {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {".dg", &dg}, {".dbeta", &dbeta}},
         make_rows},
        {"backward",
         [&] {
             const char* errors[] = {in_fp16 ? kernels.magnitudes(call, of_gradients) : nullptr,
                                     kernels.remake(call, remake),
                                     kernels.state_gradient(call, walk),
                                     kernels.gradients(call, gradients)};
             return *std::max_element(std::begin(errors), std::end(errors));
         },
         {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {".dg", &dg}, {".dbeta", &dbeta}}},
        {"kept_backward",
         [&] {
             const char* errors[] = {share < 1.0 ? kernels.remake(call, rest) : nullptr,
                                     kernels.state_gradient(call, walk),
                                     kernels.gradients(call, gradients)};
             return *std::max_element(std::begin(errors), std::end(errors));
         },
         {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {".dg", &dg}, {".dbeta", &dbeta}},
         [&] { return kernels.forward(call, keeping); }},
        {"summary",
         [&] {
             const char* errors[] = {kernels.summary(parts_call, summary),
                                     kernels.join(call, join)};
             return *std::max_element(std::begin(errors), std::end(errors));
         },
         {{".S", &S}, {".M", &M}}},
        {"gradient_summary",
         [&] {
             const char* errors[] = {kernels.state_gradient(parts_call, summary_walk),
                                     kernels.join(call, join_gradients)};
             return *std::max_element(std::begin(errors), std::end(errors));
         },
         {{".d_start", &dS}}}};
    std::printf("(%d, %d) %d tokens %s, %d repeats\n", key_heads, value_heads, tokens,
                gates.c_str(), repeats);
    for (const Timed& run : runs) {
        if (only.empty() || only.find(run.name) != std::string::npos) {
            measure(run, repeats, flush);
        } else {
            check(run.launch(), run.name.c_str());  // what later kernels read
        }
    }
    check(cudaDeviceSynchronize(), "end");
    return 0;
}
