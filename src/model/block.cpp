// A decoder layer in its two halves, each of which adds to the stream, and what of it is computed
// again in the backward pass: docs/activation-checkpointing.md.
#include "model/block.h"

#include "core/memory_class.h"
#include "hybridcp/parameter_residency.h"
#include "kernels/mlp/swiglu.h"
#include "kernels/moe/moe.h"
#include "kernels/norm/rms_norm.h"
#include "ops/conversion.h"
#include "ops/segment.h"

namespace hybridcp {

namespace {

bool is_linear(const ModelConfig& config, std::int64_t layer) {
    return config.layer_types[static_cast<std::size_t>(layer)] == LayerType::kLinearAttention;
}

at::Tensor add_to_stream(const at::Tensor& stream, const at::Tensor& term) {
    const MemoryScope scope(MemoryClass::kStream);
    return stream + term;
}

}  // namespace

LayoutTag mixer_layout(const ModelConfig& config, std::int64_t layer, const CpContext& context) {
    return is_linear(config, layer) && context.plan->to_linear ? context.plan->linear->tag
                                                               : context.plan->tag;
}

at::Tensor HybridModel::norm(const at::Tensor& hidden, std::int64_t layer, const char* name) const {
    return rms_norm_zero_centered(hidden, weight(layer, name), config_.rms_norm_eps)
        .to(compute_dtype_);
}

Sharded HybridModel::mixer_half(const Sharded& hidden, const Block& block) const {
    const auto& [layer, rotary, context, keep_router_logits] = block;
    const MemoryScope scope(is_linear(config_, layer) ? MemoryClass::kLinearAttention
                                                      : MemoryClass::kFullAttention);
    const Sharded x = convert(hidden.with(norm(hidden.local, layer, "input_layernorm.weight")),
                              mixer_layout(config_, layer, context), context);
    const Sharded mixed = is_linear(config_, layer) ? linear_mixer(x, layer, context)
                                                    : full_attention(x, layer, rotary, context);
    return hidden.with(add_to_stream(hidden.local, convert(mixed, hidden.layout, context).local));
}

HybridModel::BlockOutput HybridModel::feed_forward_half(const at::Tensor& hidden,
                                                        const Block& block) const {
    const MemoryScope scope(MemoryClass::kFeedForward);
    const std::int64_t layer = block.layer;
    const at::Tensor x = norm(hidden, layer, "post_attention_layernorm.weight");
    if (!config_.has_experts()) {
        return {.hidden = add_to_stream(hidden, swiglu(x, weight(layer, "mlp.gate_proj.weight"),
                                                       weight(layer, "mlp.up_proj.weight"),
                                                       weight(layer, "mlp.down_proj.weight")))};
    }
    const MoeOutput output =
        moe_block(x,
                  {.router = weight(layer, "mlp.gate.weight"),
                   .gate_up = weight(layer, "mlp.experts.gate_up_proj"),
                   .down = weight(layer, "mlp.experts.down_proj"),
                   .shared_gate = weight(layer, "mlp.shared_expert.gate_proj.weight"),
                   .shared_up = weight(layer, "mlp.shared_expert.up_proj.weight"),
                   .shared_down = weight(layer, "mlp.shared_expert.down_proj.weight"),
                   .shared_expert_gate = weight(layer, "mlp.shared_expert_gate.weight")},
                  config_.num_experts_per_tok);
    return {
        .hidden = add_to_stream(hidden, output.y),
        .expert_counts = output.routing.counts,
        .probability_sums = output.routing.probability_sums,
        .router_logits = block.keep_router_logits ? output.router_logits.detach() : at::Tensor()};
}

SegmentHooks HybridModel::hooks_of_unit(std::int64_t unit) const {
    if (residency == nullptr) {
        return {};
    }
    ParameterResidency* parameters = residency;
    return {.before_forward = [=] { parameters->before_forward(unit); },
            .after_forward = [=] { parameters->after_forward(unit); },
            .before_backward = [=] { parameters->before_backward(unit); },
            .after_backward = [=] { parameters->after_backward(unit); }};
}

HybridModel::BlockOutput HybridModel::run_block(const Sharded& hidden, const Block& block) const {
    const MemoryScope scope(MemoryClass::kStream);
    const auto pack = [](const BlockOutput& output) {
        return std::vector<at::Tensor>{output.hidden, output.expert_counts, output.probability_sums,
                                       output.router_logits};
    };
    const auto unpack = [](const std::vector<at::Tensor>& tensors) {
        return BlockOutput{.hidden = tensors[0],
                           .expert_counts = tensors[1],
                           .probability_sums = tensors[2],
                           .router_logits = tensors[3]};
    };
    const auto feed_forward = [this, block, pack](const std::vector<at::Tensor>& inputs,
                                                  ExchangeTape* /*tape*/) {
        return pack(feed_forward_half(inputs[0], block));
    };
    const bool recompute_half = activation_checkpoint == ActivationCheckpoint::kSelective;
    const LayoutTag layout = hidden.layout;
    const auto both = [this, block, feed_forward, recompute_half, layout](
                          const std::vector<at::Tensor>& inputs, ExchangeTape* tape) {
        Block taped = block;
        taped.context.tape = tape;
        const Sharded mixed = mixer_half({inputs[0], layout}, taped);
        return run_segment({mixed.local}, feed_forward, {.recompute = recompute_half});
    };
    return unpack(run_segment({hidden.local}, both,
                              {.recompute = activation_checkpoint == ActivationCheckpoint::kFull,
                               .hooks = hooks_of_unit(1 + block.layer)}));
}

}  // namespace hybridcp
