// What make_gdn_call hands to a backend: a checked problem. Internal to this folder.
#pragma once

#include "kernels/gdn/cuda/tables.h"
#include "kernels/gdn/gdn.h"

namespace hybridcp {
struct GdnKernelSet;
}

namespace hybridcp::gdn {

/// The token gates below this log decay are a full reset: e^-1000 is 0 in fp32 and in fp64, and
/// sums of a chunk's gates stay far from where fp64 loses digits.
constexpr double kLogDecayFloor = -1000.0;

struct Problem {
    GdnInputs inputs;  // detached
    GdnSegments segments;
    std::vector<std::int64_t> offsets;
    double scale = 1.0;
    bool use_qk_l2norm = true;
    std::int64_t chunk_size = 64;
    double summary_floor = GdnOptions::kExactSummary;
    bool keep_intermediates = true;
    double kept_share = 1.0;

    [[nodiscard]] std::int64_t num_tokens() const { return inputs.q.size(0); }
    [[nodiscard]] std::int64_t num_segments() const {
        return static_cast<std::int64_t>(offsets.size()) - 1;
    }
    [[nodiscard]] std::int64_t key_heads() const { return inputs.q.size(1); }
    [[nodiscard]] std::int64_t value_heads() const { return inputs.v.size(1); }
    [[nodiscard]] std::int64_t key_dim() const { return inputs.q.size(2); }
    [[nodiscard]] std::int64_t value_dim() const { return inputs.v.size(2); }
};

/// Checks the arguments as make_gdn_call says.
[[nodiscard]] Problem make_problem(const GdnInputs& inputs,
                                   const GdnSegments& segments,
                                   const GdnOptions& options);

/// Errors: UsageError naming the argument when it is defined and its shape is not `shape`.
void check_optional_shape(const at::Tensor& tensor, const char* name, at::IntArrayRef shape);

[[nodiscard]] std::shared_ptr<GdnCall> make_reference_call(Problem problem);
[[nodiscard]] std::shared_ptr<GdnCall> make_eager_call(Problem problem);
/// The second form takes the kernels of a certain instruction set (fused/fused_kernels.h).
/// Errors: UsageError naming what the fused backend does not take.
[[nodiscard]] std::shared_ptr<GdnCall> make_fused_call(Problem problem);
[[nodiscard]] std::shared_ptr<GdnCall> make_fused_call(Problem problem,
                                                       const GdnKernelSet& kernels);
/// Where the backend on GPUs cuts its work.
struct CudaLimits {
    /// Backward takes so many heads at once that what its kernels leave for each other stays within
    /// this, or one key head.
    std::int64_t image_bytes = std::int64_t{1280} << 20;
    /// Forward keeps what backward needs of it if all of that is within this; then the limit on
    /// what backward's kernels leave for each other is the other.
    std::int64_t kept_bytes = std::int64_t{4} << 30;
    std::int64_t kept_image_bytes = std::int64_t{640} << 20;
    /// A segment of so many chunks of 64 tokens is two parts for summaries: in parts a head that
    /// forgets nothing takes less time, but joining them is a launch more.
    std::int64_t chunks_of_two_summary_parts = cuda::kChunksOfTwoSummaryParts;
    /// If no segment has more tokens, products take operands in fp16 rather than bf16: an eighth of
    /// the error, which few tokens do not average, in up to twice the time.
    std::int64_t fp16_tokens = 2048;
};
/// On Hopper GPUs, in builds with HCP_CUDA. Errors: UsageError naming what it does not take.
[[nodiscard]] std::shared_ptr<GdnCall> make_cuda_call(Problem problem,
                                                      const CudaLimits& limits = {});

}  // namespace hybridcp::gdn
