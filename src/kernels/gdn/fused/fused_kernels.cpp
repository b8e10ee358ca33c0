// Compiled once per instruction set.

#include "kernels/gdn/fused/fused_kernels.h"

#include "kernels/gdn/fused/backward_walk.h"
#include "kernels/gdn/fused/forward_walk.h"

#if defined(__AMX_BF16__) || defined(HCP_EMULATED_TILES)
#include "kernels/gdn/fused/tile_engine.h"
#endif

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace hybridcp::HCP_ISA {
namespace {

using Fp32Engine = SimdEngine<Fp32Arithmetic>;
#if defined(__AMX_BF16__) || defined(HCP_EMULATED_TILES)
using Bf16Engine = TileEngine;
#elif defined(__AVX512BF16__) || defined(HCP_EMULATED_BF16)
using Bf16Engine = SimdEngine<Bf16Arithmetic>;
#else
using Bf16Engine = Fp32Engine;  // bf16 inputs, fp32 arithmetic
#endif

/// States decay without end: denormals, a hundred times slower, are taken as 0 meanwhile.
class FlushDenormals {
  public:
#if defined(__SSE__)
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before_); }
#else
    FlushDenormals() = default;
#endif
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

  private:
    unsigned before_ = 0;
};

template <typename Engine, template <typename, typename> class SomeWalk, typename Input>
void run(const GdnProblemView& problem, const GdnTask& range, const auto& task, void* block) {
    const FlushDenormals flush;
    Workspace space(block);
    SomeWalk<Engine, Input> walk(problem, range, space);
    Engine::begin();
    walk.run(task);
    Engine::end();
}

template <typename Engine, typename Input>
struct Functions {
    static void forward(const GdnProblemView& problem, const GdnForwardTask& task, void* block) {
        run<Engine, OutputWalk, Input>(problem, task.task, task, block);
    }
    static void summary(const GdnProblemView& problem, const GdnSummaryTask& task, void* block) {
        run<Engine, SummaryWalk, Input>(problem, task.task, task, block);
    }
    static void state_gradient(const GdnProblemView& problem,
                               const GdnStateGradientTask& task,
                               void* block) {
        run<Engine, StateGradientWalk, Input>(problem, task.task, task, block);
    }
    static void backward(const GdnProblemView& problem, const GdnBackwardTask& task, void* block) {
        run<Engine, BackwardWalk, Input>(problem, task.task, task, block);
    }

    static std::int64_t workspace_bytes(const GdnProblemView& problem) {
        GdnTask task;
        task.column_end = problem.value_dim;
        Workspace outputs(nullptr), summary(nullptr), gradients(nullptr);
        const OutputWalk<Engine, Input> output_walk(problem, task, outputs);
        const SummaryWalk<Engine, Input> summary_walk(problem, task, summary);
        const BackwardWalk<Engine, Input> backward_walk(problem, task, gradients);
        std::int64_t bytes = outputs.used_bytes();
        bytes = summary.used_bytes() > bytes ? summary.used_bytes() : bytes;
        return gradients.used_bytes() > bytes ? gradients.used_bytes() : bytes;
    }

    static std::int64_t gradient_record_floats(const GdnProblemView& problem) {
        const ChunkSizes sizes(Engine::kChunk, problem.key_dim, problem.value_dim);
        return State<Engine>::size(sizes) + std::int64_t{2} * sizes.tokens * sizes.values;
    }

    static constexpr GdnKernels table() {
        return {.chunk_tokens = Engine::kChunk,
                .checkpoint_tokens = Engine::kChunk * kCheckpointChunks<Engine>,
                .key_record_floats = KeyRecord::floats(Engine::kChunk),
                .gradient_record_floats = gradient_record_floats,
                .workspace_bytes = workspace_bytes,
                .forward = forward,
                .summary = summary,
                .state_gradient = state_gradient,
                .backward = backward,
                .prefers_huge_pages = Engine::kTiles};
    }
};

}  // namespace

const GdnKernelSet& gdn_kernels() {
    static constexpr GdnKernelSet kKernels{.fp32 = Functions<Fp32Engine, float>::table(),
                                           .bf16 = Functions<Bf16Engine, Bf16>::table()};
    return kKernels;
}

}  // namespace hybridcp::HCP_ISA
