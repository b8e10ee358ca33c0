#include "train/memory_plan_input.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "hybridcp/error.h"
#include "kernels/gdn/fused_chunk.h"
#include "train/model_setup.h"
#include "train/sharded_parameters.h"

namespace hybridcp {

namespace {

plan::LinearMode mode_of(LinearAttentionMode mode) {
    switch (mode) {
        case LinearAttentionMode::kUlysses:
            return plan::LinearMode::kUlysses;
        case LinearAttentionMode::kP2p:
            return plan::LinearMode::kP2p;
        case LinearAttentionMode::kAllGather:
            return plan::LinearMode::kAllGather;
        case LinearAttentionMode::kScan:
            return plan::LinearMode::kScan;
        case LinearAttentionMode::kGatherHidden:
            break;
    }
    return plan::LinearMode::kGatherHidden;
}

plan::FullMode mode_of(FullAttentionMode mode) {
    return mode == FullAttentionMode::kUlysses     ? plan::FullMode::kUlysses
           : mode == FullAttentionMode::kAllGather ? plan::FullMode::kAllGather
                                                   : plan::FullMode::kRing;
}

plan::Checkpointing checkpointing_of(ActivationCheckpoint choice) {
    return choice == ActivationCheckpoint::kFull        ? plan::Checkpointing::kFull
           : choice == ActivationCheckpoint::kSelective ? plan::Checkpointing::kSelective
                                                        : plan::Checkpointing::kNone;
}

}  // namespace

plan::ModelSizes model_sizes(const ModelConfig& config) {
    plan::ModelSizes sizes{.vocabulary = config.vocab_size,
                           .hidden = config.hidden_size,
                           .intermediate = config.intermediate_size,
                           .layers = {},
                           .query_heads = config.num_attention_heads,
                           .kv_heads = config.num_key_value_heads,
                           .head_dim = config.head_dim,
                           .rotary_dim = config.rotary_dim(),
                           .key_heads = config.linear_num_key_heads,
                           .value_heads = config.linear_num_value_heads,
                           .key_dim = config.linear_key_head_dim,
                           .value_dim = config.linear_value_head_dim,
                           .conv_width = config.linear_conv_kernel_dim,
                           .experts = config.num_experts,
                           .experts_per_token = config.num_experts_per_tok,
                           .expert_size = config.moe_intermediate_size,
                           .shared_expert_size = config.shared_expert_intermediate_size,
                           .has_balance_loss = config.router_aux_loss_coef != 0.0,
                           .tied = config.tie_word_embeddings,
                           .parameters = {}};
    for (const LayerType type : config.layer_types) {
        sizes.layers.push_back(type == LayerType::kLinearAttention ? plan::Mixer::kLinearAttention
                                                                   : plan::Mixer::kFullAttention);
    }
    for (const ParameterShape& parameter : parameter_shapes(config)) {
        sizes.parameters.push_back(
            {.unit = unit_of_parameter(parameter.name, config.num_layers()),
             .numel = std::accumulate(parameter.shape.begin(), parameter.shape.end(),
                                      std::int64_t{1}, std::multiplies<>()),
             .is_narrow = is_gathered_narrow(parameter)});
    }
    return sizes;
}

plan::MemoryPlanInput memory_plan_input(const Recipe& recipe) {
    const ModelConfig config = recipe_model_config(recipe.model);
    const TrainRecipe& train = recipe.train;
    const Parallel parallel = make_parallel(train.accelerator, config.head_counts(),
                                            recipe.model.dtype, /*for_this_build=*/false);
    const std::int64_t rows_per_rank = (train.global_batch_size + parallel.dp - 1) / parallel.dp;
    const std::int64_t rows = std::min(train.micro_batch_size, rows_per_rank);
    return {
        .model = model_sizes(config),
        .rows = rows,
        .row_tokens = recipe.data.sequence_length,
        .micro_batches = (rows_per_rank + rows - 1) / rows,
        .dp = parallel.dp,
        .cp = parallel.cp,
        .sharded = parallel.fsdp,
        .shard_size = parallel.shard_size,
        .prefetch = parallel.fsdp_prefetch,
        .linear_mode = mode_of(parallel.linear_attention_mode),
        .full_mode = mode_of(parallel.full_attention_mode),
        .converts = parallel.linear_layout_kind != parallel.layout_kind,
        .chunks_per_row = parallel.linear_layout_kind == LayoutKind::kZigzag ? 2 : 1,
        .checkpointing = checkpointing_of(activation_checkpoint_of(train.activation_checkpoint)),
        .element_bytes = recipe.model.dtype == "fp32" ? 4 : 2,
        .fused_gdn = parallel.linear_attention_backend == LinearAttentionBackend::kFused,
        .fused_chunk = fused_gdn_chunk(recipe.model.dtype == "fp32"),
        .gdn_chunk = train.gdn_chunk_size,
        .on_cuda = train.accelerator.device == "cuda"};
}

}  // namespace hybridcp
