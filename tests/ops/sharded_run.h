// Runs an op on P ranks (threads) over a layout and puts outputs and gradients back together, so
// that a test compares plain global tensors with a run on one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "hybridcp/layout.h"
#include "ops/context_parallel.h"

namespace hybridcp::testing {

inline constexpr int kConvWidth = 4;

struct ShardedRun {
    at::Tensor output;  // [T, ...]
    std::vector<at::Tensor>
        gradients;  // of each token tensor, [T, ...], then of each weight (summed over ranks)
    std::vector<Recorder> traffic;  // per rank
};

struct OpInputs {
    std::vector<at::Tensor> tokens;   // [T, ...] each, sharded
    std::vector<at::Tensor> weights;  // replicated
    at::Tensor d_output;              // [T, ...]
};

/// The op on one rank's shards: tokens then weights, in the order of OpInputs.
using Op = std::function<at::Tensor(const std::vector<at::Tensor>&, const CpContext&)>;

/// `repeats` passes in one process group; the results of all passes must have the same bits.
[[nodiscard]] ShardedRun run_sharded(const Layout& layout,
                                     const Parallel& parallel,
                                     const OpInputs& inputs,
                                     const Op& op,
                                     int repeats = 1);

/// A local tensor in the layout of the context's plan.
[[nodiscard]] inline Sharded shard(const at::Tensor& local, const CpContext& context) {
    return {local, context.plan->tag};
}

/// |a - b| / |b| over the whole tensor, or |a| where b is zero.
[[nodiscard]] double relative_error(const at::Tensor& a, const at::Tensor& b);
/// The largest relative error over the heads (dim 1) of [T, H, ...], with the rule for heads that
/// are almost zero.
[[nodiscard]] double worst_head_error(const at::Tensor& a, const at::Tensor& b);

struct LayoutCase {
    std::string name;
    std::vector<std::int64_t> document_lengths;
    LayoutCut cut = LayoutCut::kDocument;
    /// Relative weights of the ranks' shards, cyclic; empty for an even cut. Only with kRow.
    std::vector<std::int64_t> shard_weights = {};
    LayoutKind kind = LayoutKind::kContiguous;
};

inline constexpr std::array kLayoutKinds{LayoutKind::kContiguous, LayoutKind::kZigzag,
                                         LayoutKind::kFolded};

[[nodiscard]] Layout make_layout(const LayoutCase& layout_case, int num_ranks);
/// Even, odd, packed, empty, tiny and uneven layouts, of every kind.
[[nodiscard]] std::vector<LayoutCase> layout_cases();

}  // namespace hybridcp::testing
