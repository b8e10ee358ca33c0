// What can run with what. ParallelOptions holds the words of a recipe's `train.accelerator` block;
// check_support is the one place that says yes, or names the rule that is broken and the nearest
// supported choice, before any rank communicates. Mode (a distributed algorithm) and backend (a
// local implementation) are orthogonal.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "hybridcp/layout.h"

namespace hybridcp {

enum class LinearAttentionMode { kUlysses, kP2p, kAllGather, kScan, kGatherHidden };
enum class FullAttentionMode { kUlysses, kAllGather, kRing };
enum class LinearAttentionBackend { kReference, kEager, kFused };

struct ParallelOptions {
    std::string device = "cpu";  // cpu | cuda
    int dp = 1;
    int cp = 1;
    int tp = 1;
    bool fsdp = false;  // parameters, gradients and optimizer state sharded over dp x cp
    std::optional<int> fsdp_shard_size =
        std::nullopt;           // over so many consecutive ranks, replicated across; none: all
    bool fsdp_prefetch = true;  // gather the next block's parameters ahead
    std::optional<int> ulysses_degree = std::nullopt;
    std::string full_attention_cp_mode = "ulysses";  // ulysses | all_gather | ring
    std::string linear_attention_cp_mode =
        "ulysses";  // ulysses | p2p | all_gather | scan | gather_hidden
    std::string linear_attention_gdn_backend = "eager";  // eager | fused | reference
    std::string linear_attention_summary = "truncated";  // truncated | exact
    std::string sequence_layout = "contiguous";          // contiguous | zigzag | folded
    std::string layout_cut = "document";                 // document | row
    std::string linear_attention_layout = "native";      // native | convert
    std::string convert_to = "folded";                   // folded | contiguous
};

/// The sizes that the rules look at.
struct HeadCounts {
    std::int64_t linear_key_heads = 1;
    std::int64_t linear_value_heads = 1;
    std::int64_t query_heads = 1;
    std::int64_t kv_heads = 1;
};

struct Support {
    bool supported = true;
    std::string rule;     // the rule that is broken, with the values
    std::string nearest;  // key: value of the nearest supported choice
};

/// dtype: the compute dtype's name in the recipe, fp32 | bf16. for_this_build: as make_parallel.
[[nodiscard]] Support check_support(const ParallelOptions& options,
                                    const HeadCounts& heads,
                                    const std::string& dtype,
                                    bool for_this_build = true);

/// The same kernels on one rank: what many ranks are compared with.
[[nodiscard]] ParallelOptions on_one_rank(ParallelOptions options);

/// Ranks that share the parameters among them; 1 without fsdp.
[[nodiscard]] int shard_size(const ParallelOptions& options);

/// The options once checked, as enumerations.
struct Parallel {
    int dp = 1;
    int cp = 1;
    bool fsdp = false;
    int shard_size = 1;  // ranks that share the parameters among them; 1 without fsdp
    bool fsdp_prefetch = true;
    LinearAttentionMode linear_attention_mode = LinearAttentionMode::kUlysses;
    FullAttentionMode full_attention_mode = FullAttentionMode::kUlysses;
    LinearAttentionBackend linear_attention_backend = LinearAttentionBackend::kEager;
    /// Summaries leave out only what cannot change a bit, not all that fp32 rounds away.
    bool exact_summaries = false;
    LayoutKind layout_kind = LayoutKind::kContiguous;  // of the stream between layers
    LayoutCut layout_cut = LayoutCut::kDocument;
    LayoutKind linear_layout_kind = LayoutKind::kContiguous;  // of the linear-attention layers
    /// Neighbouring layers that agree share a conversion. Off only to measure what that saves.
    bool elide_conversions = true;
};

/// Errors: UsageError with check_support's rule and nearest choice.
/// for_this_build false: to plan for a device that this build does not have.
[[nodiscard]] Parallel make_parallel(const ParallelOptions& options,
                                     const HeadCounts& heads,
                                     const std::string& dtype,
                                     bool for_this_build = true);

}  // namespace hybridcp
