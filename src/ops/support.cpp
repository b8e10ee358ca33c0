// The support matrix: every rule that a combination of mode, backend, device, dtype and shape can
// break.

#include <fmt/ranges.h>

#include <array>
#include <numeric>
#include <span>
#include <string_view>

#include "hybridcp/error.h"
#include "hybridcp/parallel.h"

namespace hybridcp {

namespace {

/// The words that a key accepts.
struct Choice {
    std::string_view key;
    std::string_view value;
    std::span<const std::string_view> known;
};

constexpr std::array<std::string_view, 2> kDevices{"cpu", "cuda"};
constexpr std::array<std::string_view, 2> kDtypes{"fp32", "bf16"};
constexpr std::array<std::string_view, 3> kFullModes{"ulysses", "all_gather", "ring"};
constexpr std::array<std::string_view, 5> kLinearModes{"p2p", "all_gather", "scan", "ulysses",
                                                       "gather_hidden"};
constexpr std::array<std::string_view, 3> kBackends{"eager", "fused", "reference"};
constexpr std::array<std::string_view, 2> kSummaries{"truncated", "exact"};
constexpr std::array<std::string_view, 3> kLayouts{"contiguous", "zigzag", "folded"};
constexpr std::array<std::string_view, 2> kCuts{"document", "row"};
constexpr std::array<std::string_view, 2> kLinearLayouts{"native", "convert"};
constexpr std::array<std::string_view, 2> kConversions{"folded", "contiguous"};

Support refuse(std::string rule, std::string nearest) {
    return {.supported = false, .rule = std::move(rule), .nearest = std::move(nearest)};
}

Support check_choice(const Choice& choice) {
    for (const std::string_view word : choice.known) {
        if (word == choice.value) {
            return {};
        }
    }
    return refuse(
        fmt::format("{}: {} is unknown (known: {})", choice.key, choice.value,
                    fmt::join(choice.known, ", ")),
        fmt::format("{}: {}", choice.key, nearest_word(std::string(choice.value), choice.known)));
}

Support check_words(const ParallelOptions& options, const std::string& dtype) {
    if (options.linear_attention_gdn_backend == "triton") {
        return refuse("linear_attention_gdn_backend: triton does not exist here, fused is meant",
                      "linear_attention_gdn_backend: fused");
    }
    const std::array<Choice, 10> choices{{
        {"device", options.device, kDevices},
        {"dtype", dtype, kDtypes},
        {"full_attention_cp_mode", options.full_attention_cp_mode, kFullModes},
        {"linear_attention_cp_mode", options.linear_attention_cp_mode, kLinearModes},
        {"linear_attention_gdn_backend", options.linear_attention_gdn_backend, kBackends},
        {"linear_attention_summary", options.linear_attention_summary, kSummaries},
        {"sequence_layout", options.sequence_layout, kLayouts},
        {"layout_cut", options.layout_cut, kCuts},
        {"linear_attention_layout", options.linear_attention_layout, kLinearLayouts},
        {"convert_to", options.convert_to, kConversions},
    }};
    for (const Choice& choice : choices) {
        if (Support support = check_choice(choice); !support.supported) {
            return support;
        }
    }
    return {};
}

Support check_sizes(const ParallelOptions& options) {
    if (options.dp < 1 || options.cp < 1) {
        return refuse(fmt::format("dp: {}, cp: {}: both are at least 1", options.dp, options.cp),
                      "dp: 1, cp: 1");
    }
    if (options.tp != 1) {
        return refuse(
            fmt::format("tp: {}: linear-attention context parallelism needs tp: 1", options.tp),
            "tp: 1");
    }
    if (options.fsdp_shard_size && !options.fsdp) {
        return refuse("fsdp_shard_size would be ignored without fsdp: true", "fsdp: true");
    }
    const int num_ranks = options.dp * options.cp;
    if (options.fsdp_shard_size && num_ranks % *options.fsdp_shard_size != 0) {
        return refuse(
            fmt::format("fsdp_shard_size: {} does not divide dp x cp ({})",
                        *options.fsdp_shard_size, num_ranks),
            fmt::format("fsdp_shard_size: {}", std::gcd(*options.fsdp_shard_size, num_ranks)));
    }
    if (options.ulysses_degree.has_value() && *options.ulysses_degree != options.cp) {
        return refuse(fmt::format("ulysses_degree: {} is neither null nor cp ({})",
                                  *options.ulysses_degree, options.cp),
                      fmt::format("ulysses_degree: {}", options.cp));
    }
    return {};
}

Support check_heads(const ParallelOptions& options, const HeadCounts& heads) {
    if (heads.linear_key_heads < 1 || heads.linear_value_heads % heads.linear_key_heads != 0) {
        return refuse(fmt::format("{} linear value heads are not a multiple of {} key heads",
                                  heads.linear_value_heads, heads.linear_key_heads),
                      "a model whose value heads divide evenly over its key heads");
    }
    if (heads.kv_heads < 1 || heads.query_heads % heads.kv_heads != 0) {
        return refuse(fmt::format("{} query heads are not a multiple of {} KV heads",
                                  heads.query_heads, heads.kv_heads),
                      "a model whose query heads divide evenly over its KV heads");
    }
    if (options.full_attention_cp_mode == "ulysses" && heads.query_heads % options.cp != 0) {
        return refuse(
            fmt::format("full_attention_cp_mode: ulysses splits {} query heads over cp: {}, "
                        "which does not divide them",
                        heads.query_heads, options.cp),
            "full_attention_cp_mode: all_gather");
    }
    if (options.linear_attention_cp_mode == "ulysses" &&
        heads.linear_value_heads % options.cp != 0) {
        return refuse(
            fmt::format("linear_attention_cp_mode: ulysses splits {} value heads over cp: "
                        "{}, which does not divide them",
                        heads.linear_value_heads, options.cp),
            "linear_attention_cp_mode: p2p");
    }
    return {};
}

Support check_device(const ParallelOptions& options,
                     const std::string& dtype,
                     [[maybe_unused]] bool for_this_build) {
#ifndef HCP_CUDA
    if (options.device == "cuda" && for_this_build) {
        return refuse("device: cuda needs a build configured with HCP_CUDA=ON", "device: cpu");
    }
#endif
    if (options.device != "cuda") {
        return {};
    }
    if (options.linear_attention_gdn_backend == "reference") {
        return refuse("linear_attention_gdn_backend: reference runs on device: cpu only",
                      "linear_attention_gdn_backend: eager");
    }
    if (options.linear_attention_gdn_backend == "fused" && dtype != "bf16") {
        return refuse(fmt::format("linear_attention_gdn_backend: fused on device: cuda takes "
                                  "model.dtype bf16, not {}",
                                  dtype),
                      "linear_attention_gdn_backend: eager");
    }
    return {};
}

LinearAttentionBackend linear_backend(const std::string& word) {
    return word == "reference" ? LinearAttentionBackend::kReference
           : word == "fused"   ? LinearAttentionBackend::kFused
                               : LinearAttentionBackend::kEager;
}

LinearAttentionMode linear_mode(const std::string& word) {
    return word == "p2p"             ? LinearAttentionMode::kP2p
           : word == "all_gather"    ? LinearAttentionMode::kAllGather
           : word == "scan"          ? LinearAttentionMode::kScan
           : word == "gather_hidden" ? LinearAttentionMode::kGatherHidden
                                     : LinearAttentionMode::kUlysses;
}

LayoutKind layout_kind(const std::string& word) {
    return word == "zigzag"   ? LayoutKind::kZigzag
           : word == "folded" ? LayoutKind::kFolded
                              : LayoutKind::kContiguous;
}

}  // namespace

Support check_support(const ParallelOptions& options,
                      const HeadCounts& heads,
                      const std::string& dtype,
                      bool for_this_build) {
    if (Support support = check_words(options, dtype); !support.supported) {
        return support;
    }
    if (Support support = check_sizes(options); !support.supported) {
        return support;
    }
    if (Support support = check_device(options, dtype, for_this_build); !support.supported) {
        return support;
    }
    return check_heads(options, heads);
}

ParallelOptions on_one_rank(ParallelOptions options) {
    options.dp = options.cp = 1;
    options.fsdp = false;
    options.fsdp_shard_size.reset();
    options.ulysses_degree.reset();
    return options;
}

int shard_size(const ParallelOptions& options) {
    return options.fsdp ? options.fsdp_shard_size.value_or(options.dp * options.cp) : 1;
}

Parallel make_parallel(const ParallelOptions& options,
                       const HeadCounts& heads,
                       const std::string& dtype,
                       bool for_this_build) {
    const Support support = check_support(options, heads, dtype, for_this_build);
    if (!support.supported) {
        throw UsageError(
            fmt::format("{}; nearest supported choice: {}", support.rule, support.nearest));
    }
    Parallel parallel;
    parallel.dp = options.dp;
    parallel.cp = options.cp;
    parallel.fsdp = options.fsdp;
    parallel.shard_size = shard_size(options);
    parallel.fsdp_prefetch = options.fsdp_prefetch;
    parallel.linear_attention_mode = linear_mode(options.linear_attention_cp_mode);
    parallel.full_attention_mode =
        options.full_attention_cp_mode == "all_gather" ? FullAttentionMode::kAllGather
        : options.full_attention_cp_mode == "ring"     ? FullAttentionMode::kRing
                                                       : FullAttentionMode::kUlysses;
    parallel.linear_attention_backend = linear_backend(options.linear_attention_gdn_backend);
    parallel.exact_summaries = options.linear_attention_summary == "exact";
    parallel.layout_kind = layout_kind(options.sequence_layout);
    parallel.layout_cut = options.layout_cut == "row" ? LayoutCut::kRow : LayoutCut::kDocument;
    const bool converts = options.linear_attention_layout == "convert" &&
                          parallel.linear_attention_mode != LinearAttentionMode::kGatherHidden;
    parallel.linear_layout_kind = converts ? layout_kind(options.convert_to) : parallel.layout_kind;
    return parallel;
}

}  // namespace hybridcp
