#include "kernels/moe/moe.h"

#include <ATen/ops/sigmoid.h>

#include "kernels/linear/linear.h"
#include "kernels/mlp/swiglu.h"
#include "kernels/moe/experts.h"

namespace hybridcp {

MoeOutput moe_block(const at::Tensor& x,
                    const MoeWeights& weights,
                    std::int64_t num_experts_per_token) {
    MoeOutput output;
    output.router_logits = linear_projection(x, weights.router);
    output.routing = route(output.router_logits, num_experts_per_token);
    const at::Tensor shared =
        swiglu(x, weights.shared_gate, weights.shared_up, weights.shared_down);
    const at::Tensor shared_share = at::sigmoid(linear_projection(x, weights.shared_expert_gate));
    output.y = expert_mlp(x, output.routing, weights.gate_up, weights.down) + shared_share * shared;
    return output;
}

}  // namespace hybridcp
