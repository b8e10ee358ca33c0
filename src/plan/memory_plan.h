// How much memory a training step takes on one rank, by class, from the sizes alone. The step is
// gone through as the code goes through it (block_memory.h), with numbers of bytes for tensors.
// docs/memory.md has every term as a formula.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/memory_ledger.h"

namespace hybridcp::plan {

enum class Mixer { kLinearAttention, kFullAttention };
enum class LinearMode { kUlysses, kP2p, kAllGather, kScan, kGatherHidden };
enum class FullMode { kUlysses, kAllGather, kRing };
enum class Checkpointing { kNone, kSelective, kFull };

struct PlannedParameter {
    std::int64_t unit = 0;  // 0 the embedding, 1 + i block i, 1 + number of blocks the head
    std::int64_t numel = 0;
    bool is_narrow = true;  // computed with in the compute dtype; else in fp32
};

struct ModelSizes {
    std::int64_t vocabulary = 0;
    std::int64_t hidden = 0;
    std::int64_t intermediate = 0;  // of the dense feed-forward
    std::vector<Mixer> layers;
    std::int64_t query_heads = 0, kv_heads = 0, head_dim = 0, rotary_dim = 0;
    std::int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, conv_width = 4;
    std::int64_t experts = 0, experts_per_token = 0, expert_size = 0, shared_expert_size = 0;
    bool has_balance_loss = false;
    bool tied = false;
    std::vector<PlannedParameter> parameters;
};

struct MemoryPlanInput {
    ModelSizes model;
    std::int64_t rows = 1;  // of a micro-batch; each is one document
    std::int64_t row_tokens = 0;
    std::int64_t micro_batches = 1;  // of a rank in a step
    std::int64_t dp = 1, cp = 1;
    bool sharded = false;
    std::int64_t shard_size = 1;  // ranks that share the parameters
    bool prefetch = true;
    LinearMode linear_mode = LinearMode::kUlysses;
    FullMode full_mode = FullMode::kUlysses;
    bool converts = false;            // linear layers in another layout than the stream
    std::int64_t chunks_per_row = 1;  // segments of a row on a rank in linear layers: 2 for zigzag
    Checkpointing checkpointing = Checkpointing::kNone;
    std::int64_t element_bytes = 4;  // of the compute dtype
    bool fused_gdn = false;          // else eager
    std::int64_t fused_chunk = 32;   // tokens of a chunk there
    std::int64_t gdn_chunk = 64;     // of eager
    bool on_cuda = false;
};

/// The peak of a step on the rank with the most tokens.
[[nodiscard]] PeakMemory plan_memory(const MemoryPlanInput& input);

/// A change and what the peak would be with it.
struct Advice {
    std::string change;  // as the recipe writes it
    std::int64_t total_bytes = 0;
};
/// Single changes that lower the peak, the best first.
[[nodiscard]] std::vector<Advice> memory_advice(const MemoryPlanInput& input);

}  // namespace hybridcp::plan
