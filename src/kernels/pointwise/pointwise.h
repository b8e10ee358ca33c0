// The memory-bound operators (conv, norms, rotary, SwiGLU's activation, cross-entropy) have two
// implementations each: plain ATen, for every device and dtype, and fused kernels that read and
// write memory once, for fp32 and bf16 on the CPU (docs/fused-pointwise.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/pointwise/arguments.h"
#include "kernels/simd/isa.h"

namespace hybridcp {

enum class PointwiseBackend : std::int8_t { kFused, kEager };

/// Forces the implementation of the pointwise operators for forward and backward passes on this
/// thread while it lives (benchmarks, tests); kFused is the default and applies where it exists.
class ForcedPointwise {
  public:
    explicit ForcedPointwise(PointwiseBackend backend);
    ~ForcedPointwise();
    ForcedPointwise(const ForcedPointwise&) = delete;
    ForcedPointwise& operator=(const ForcedPointwise&) = delete;

  private:
    PointwiseBackend previous_;
};

/// Whether tensors of this kind take the fused kernels: all on the CPU, of one dtype, fp32 or bf16.
[[nodiscard]] bool takes_fused(std::initializer_list<at::Tensor> tensors);

/// Errors: UsageError for a dtype that is neither fp32 nor bf16.
[[nodiscard]] Element element_of(const at::Tensor& x);

/// x [..., D] -> [rows, D] with the elements of a row side by side; a view where there is one.
[[nodiscard]] at::Tensor as_rows(const at::Tensor& x);

[[nodiscard]] ConstRows read_rows(const at::Tensor& rows);
[[nodiscard]] Rows write_rows(at::Tensor& rows);

/// partials [count, ...] fp32 -> their sum [...], in order.
[[nodiscard]] at::Tensor sum_partials(const at::Tensor& partials);

inline constexpr std::int64_t kTaskElements = std::int64_t{1} << 16;

/// Rows that one task takes: by shape alone, so that results do not depend on the threads.
[[nodiscard]] inline std::int64_t rows_of_task(std::int64_t width, std::int64_t least) {
    return std::max(least, kTaskElements / std::max<std::int64_t>(width, 1));
}

[[nodiscard]] inline std::int64_t count_blocks(std::int64_t size, std::int64_t step) {
    return (size + step - 1) / step;
}

/// Runs body(range, block, thread) for each block of `step` of 0 .. size-1 on the threads of ATen.
template <typename Body>
void for_each_block(std::int64_t size, std::int64_t step, const Body& body) {
    parallel_tasks(count_blocks(size, step), [&](std::int64_t block, int thread) {
        body(Range{block * step, std::min(size, (block + 1) * step)}, block, thread);
    });
}

}  // namespace hybridcp
