// The text tower of the Qwen3.5 family, dense or with a mixture of experts: parameters under their
// Hugging Face names, forward pass over the local tokens of a batch. The formulas are the public
// model's; experts: docs/moe.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "hybridcp/model_config.h"

namespace hybridcp {

struct CpContext;          // ops/context_parallel.h
struct Sharded;            // ops/sharded.h
struct RotaryTables;       // kernels/rotary/rotary.h
struct SegmentHooks;       // ops/segment.h
class ParameterResidency;  // parameter_residency.h

struct NamedParameter {
    std::string name;  // Hugging Face's, prefix `model.`
    at::Tensor
        value;  // leaf that requires grad, fp32; sharded: in the compute dtype, of fp32 .grad
};

struct ForwardResult {
    at::Tensor hidden;                  // [T, d] after the final norm
    std::vector<at::Tensor> per_layer;  // [T, d] output of each layer, detached, when asked for
    // Of a model with experts, over this rank's tokens and all layers (kernels/moe/router.h);
    // undefined in a dense one. The load-balancing loss is made of them.
    at::Tensor expert_counts = {};               // [E] int64
    at::Tensor probability_sums = {};            // [E] fp64, differentiable
    std::vector<at::Tensor> router_logits = {};  // [T, E] of each layer, detached, when asked for
};

/// The first layer whose output (per_layer) holds a value that is not finite; nothing when all are.
[[nodiscard]] std::optional<std::int64_t> first_non_finite_layer(const ForwardResult& result);

/// What is computed again in the backward pass instead of kept (docs/activation-checkpointing.md):
/// nothing, every block, or the feed-forward half of every block. Bits do not depend on it.
enum class ActivationCheckpoint { kNone, kFull, kSelective };

class HybridModel {
  public:
    /// Parameters of the given names, in parameter_shapes order. compute_dtype: kFloat or kBFloat16
    /// (kDouble in tests).
    HybridModel(ModelConfig config,
                std::vector<NamedParameter> parameters,
                at::ScalarType compute_dtype);
    /// Random initialisation as Hugging Face does it, the same on every rank for the same seed.
    [[nodiscard]] static HybridModel random(const ModelConfig& config,
                                            std::uint64_t seed,
                                            at::ScalarType compute_dtype,
                                            const at::Device& device);

    [[nodiscard]] const ModelConfig& config() const { return config_; }
    [[nodiscard]] at::ScalarType compute_dtype() const { return compute_dtype_; }
    [[nodiscard]] const std::vector<NamedParameter>& parameters() const { return parameters_; }
    [[nodiscard]] const at::Tensor& parameter(const std::string& name) const;
    /// lm_head.weight, or the embedding when tied, as it is kept. [vocabulary, d]
    [[nodiscard]] at::Tensor head_weight() const;

    /// token_ids: [T] int64, the local tokens in the plan's local order.
    [[nodiscard]] ForwardResult forward(const at::Tensor& token_ids,
                                        const CpContext& context,
                                        bool keep_per_layer = false) const;
    /// One layer's mixer: attention of either kind, without norm and residual.
    /// Shapes: x [T, d] in the layout in which the layer runs (a linear one: the plan's linear
    /// layout), in the compute dtype; returns [T, d] in the same.
    [[nodiscard]] Sharded mixer(const Sharded& x,
                                std::int64_t layer,
                                const CpContext& context) const;
    std::int64_t gdn_chunk_size = 64;
    ActivationCheckpoint activation_checkpoint = ActivationCheckpoint::kNone;
    /// Told when weights are needed; null: they are always there. It must outlive backward passes.
    ParameterResidency* residency = nullptr;

  private:
    struct Block;        // one layer's call
    struct BlockOutput;  // and what it gives
    BlockOutput run_block(const Sharded& hidden, const Block& block) const;
    Sharded mixer_half(const Sharded& hidden, const Block& block) const;
    BlockOutput feed_forward_half(const at::Tensor& hidden, const Block& block) const;
    // The mixers of a layer, in the layout of x, which is that of the context's plan.
    Sharded linear_attention(const Sharded& x, std::int64_t layer, const CpContext& context) const;
    Sharded linear_mixer(const Sharded& x, std::int64_t layer, const CpContext& context) const;
    Sharded full_attention(const Sharded& x,
                           std::int64_t layer,
                           const RotaryTables& rotary,
                           const CpContext& context) const;
    /// Around the passes of a unit (parameter_residency.h).
    SegmentHooks hooks_of_unit(std::int64_t unit) const;
    at::Tensor embed(const at::Tensor& token_ids) const;
    at::Tensor norm(const at::Tensor& hidden, std::int64_t layer, const char* name) const;
    at::Tensor weight(std::int64_t layer, const std::string& suffix) const;  // likewise
    at::Tensor exact_weight(const std::string& name) const;  // as it is kept (fp64 in fp64)

    ModelConfig config_;
    std::vector<NamedParameter> parameters_;
    std::unordered_map<std::string, std::size_t> index_by_name_;
    at::ScalarType compute_dtype_;
};

/// Loads the parameters of a Hugging Face folder (one file or shards with
/// model.safetensors.index.json; names with prefix `model.` or `model.language_model.`; experts
/// fused or one by one; bf16 or fp32), as fp32 leaves. Vision and multi-token-prediction tensors
/// are skipped, and so are those of the folder's own configuration that `config` does not have
/// (layers beyond its last, lm_head.weight when tied); their number goes to `skipped` (a line for
/// the user, empty for none). Errors: FormatError naming the tensor (missing, surplus, of another
/// shape or dtype) or the truncated file.
[[nodiscard]] std::vector<NamedParameter> load_parameters(const std::string& folder,
                                                          const ModelConfig& config,
                                                          const at::Device& device,
                                                          std::string* skipped = nullptr);
inline constexpr std::int64_t kMaxShardBytes = 5'000'000'000;
/// Saves config.json and model.safetensors (dtype: kFloat or kBFloat16; A_log, dt_bias and norms
/// stay fp32; experts fused, as in the released files) so that Transformers loads them; weights
/// beyond max_shard_bytes are split in shards with an index. Files are complete or absent: written
/// under temporary names, synced, renamed. Errors: UsageError for another dtype; FormatError naming
/// the path and the system's reason.
void save_model(const HybridModel& model,
                const std::string& folder,
                at::ScalarType dtype,
                std::int64_t max_shard_bytes = kMaxShardBytes);

}  // namespace hybridcp
