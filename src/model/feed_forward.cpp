// The feed-forward of a decoder layer: dense, or a mixture of experts whose router statistics are
// summed over the layers.
#include "hybridcp/model.h"
#include "kernels/mlp/swiglu.h"
#include "kernels/moe/moe.h"

namespace hybridcp {

at::Tensor HybridModel::feed_forward(const at::Tensor& x,
                                     std::int64_t layer,
                                     bool keep_router_logits,
                                     ForwardResult& result) const {
    if (!config_.has_experts()) {
        return swiglu(x, weight(layer, "mlp.gate_proj.weight"), weight(layer, "mlp.up_proj.weight"),
                      weight(layer, "mlp.down_proj.weight"));
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
    const auto add = [](at::Tensor& sum, const at::Tensor& term) {
        sum = sum.defined() ? sum + term : term;
    };
    add(result.expert_counts, output.routing.counts);
    add(result.probability_sums, output.routing.probability_sums);
    if (keep_router_logits) {
        result.router_logits.push_back(output.router_logits.detach());
    }
    return output.y;
}

}  // namespace hybridcp
