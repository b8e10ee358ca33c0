#include "hcp/op_formulas.h"

#include <ATen/ATen.h>

#include <cmath>

#include "kernels/attention/attention.h"
#include "kernels/conv/causal_conv.h"
#include "kernels/gdn/gate.h"
#include "kernels/linear/linear.h"
#include "kernels/loss/cross_entropy.h"
#include "kernels/mlp/swiglu.h"
#include "kernels/moe/moe.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/rotary/rotary.h"

namespace hybridcp::cli {

namespace {

at::Tensor find(const NamedTensors& tensors, const std::string& name) {
    const auto entry = tensors.find(name);
    return entry == tensors.end() ? at::Tensor() : entry->second;
}

RotaryTables rotary_tables(const at::Tensor& like, const OpCase& op_case, std::int64_t rotary_dim) {
    const at::Tensor positions = op_case.read("position_ids").flatten().to(like.device());
    return make_rotary_tables(positions, rotary_dim, op_case.option("rope_theta").get<double>(),
                              like.scalar_type());
}

NamedTensors conv1d(const NamedTensors& in, const OpCase& op_case) {
    const at::Tensor& x = in.at("x");
    const at::Tensor y = causal_conv_silu(x.flatten(0, 1), in.at("weight"), find(in, "halo"),
                                          op_case.document_offsets(x.size(0), x.size(1)));
    return {{"y", y.view_as(x)}};
}

NamedTensors gated_rmsnorm(const NamedTensors& in, const OpCase& op_case) {
    return {{"y", rms_norm_gated(in.at("x"), in.at("z"), in.at("weight"),
                                 op_case.option("eps").get<double>())}};
}

NamedTensors rmsnorm_zero_centered(const NamedTensors& in, const OpCase& op_case) {
    return {{"y", rms_norm_zero_centered(in.at("x"), in.at("weight"),
                                         op_case.option("eps").get<double>())}};
}

NamedTensors rope_partial(const NamedTensors& in, const OpCase& op_case) {
    const at::Tensor& q = in.at("q");  // [B, T, H, D]
    const at::Tensor& k = in.at("k");
    const auto rotary_dim = op_case.option("rotary_dim").get<std::int64_t>();
    const RotaryTables tables = rotary_tables(q, op_case, rotary_dim);
    const auto table_shape = {q.size(0), q.size(1), rotary_dim};
    return {{"q_rot", apply_partial_rotary(q.flatten(0, 1), tables).view_as(q)},
            {"k_rot", apply_partial_rotary(k.flatten(0, 1), tables).view_as(k)},
            {"cos", tables.cos.view(table_shape)},
            {"sin", tables.sin.view(table_shape)}};
}

NamedTensors gated_attention(const NamedTensors& in, const OpCase& op_case) {
    const at::Tensor& qg = in.at("qg");  // [B, T, Hq, 2D]
    const std::int64_t batch = qg.size(0);
    const std::int64_t length = qg.size(1);
    const std::int64_t head_dim = qg.size(3) / 2;
    const auto query_and_gate = qg.flatten(0, 1).split(head_dim, -1);
    const double eps = op_case.option("eps").get<double>();
    const double rotary_factor = op_case.option("partial_rotary_factor").get<double>();
    const auto rotary_dim = std::llround(rotary_factor * static_cast<double>(head_dim));
    const RotaryTables tables = rotary_tables(qg, op_case, rotary_dim);
    const at::Tensor q = apply_partial_rotary(
        rms_norm_zero_centered(query_and_gate[0], in.at("q_norm"), eps), tables);
    const at::Tensor k = apply_partial_rotary(
        rms_norm_zero_centered(in.at("k").flatten(0, 1), in.at("k_norm"), eps), tables);
    std::vector<AttentionBlock> blocks;
    const auto offsets = op_case.document_offsets(batch, length);
    for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
        blocks.push_back({.q_begin = offsets[i],
                          .q_end = offsets[i + 1],
                          .kv_begin = offsets[i],
                          .kv_end = offsets[i + 1]});
    }
    const AttentionOutput out = causal_attention(q, k, in.at("v").flatten(0, 1), blocks,
                                                 op_case.option("scale").get<double>());
    const std::vector<std::int64_t> flat_heads = {batch, length, -1};
    return {{"o_ungated", out.o.reshape(flat_heads)},
            {"o", (out.o * at::sigmoid(query_and_gate[1])).reshape(flat_heads)},
            {"lse", out.lse.view({batch, length, -1})}};
}

NamedTensors gdn_gate(const NamedTensors& in, const OpCase& /*op_case*/) {
    return {{"g", gdn_log_decay(in.at("a"), in.at("A_log"), in.at("dt_bias"))},
            {"beta", gdn_beta(in.at("b"))}};
}

NamedTensors swiglu_mlp(const NamedTensors& in, const OpCase& /*op_case*/) {
    return {{"y", swiglu(in.at("x"), in.at("gate"), in.at("up"), in.at("down"))}};
}

/// The logits of several layers, of which the rows that attention_mask leaves count: padding is
/// dropped before it is routed.
NamedTensors moe_aux_loss(const NamedTensors& in, const OpCase& op_case, std::int64_t top_k) {
    at::Tensor counts, sums;
    std::int64_t num_rows = 0;
    for (std::int64_t layer = 0; in.count(fmt::format("logits.{}", layer)) != 0; ++layer) {
        at::Tensor rows = in.at(fmt::format("logits.{}", layer));
        if (op_case.has("attention_mask")) {
            const at::Tensor kept = op_case.read("attention_mask").flatten().nonzero().squeeze(1);
            rows = rows.index_select(0, kept.to(rows.device()));
        }
        const Routing routing = route(rows, top_k);
        counts = counts.defined() ? counts + routing.counts : routing.counts;
        sums = sums.defined() ? sums + routing.probability_sums : routing.probability_sums;
        num_rows += rows.size(0);
    }
    const at::Tensor all_rows = at::full({}, num_rows, counts.options());
    return {{"aux", load_balancing_coefficients(counts, all_rows).dot(sums)}};
}

/// The four kinds of case: router, whole block, load-balancing loss with and without a mask.
NamedTensors moe(const NamedTensors& in, const OpCase& op_case) {
    const auto top_k = op_case.option("top_k").get<std::int64_t>();
    if (in.count("x") == 0) {
        return moe_aux_loss(in, op_case, top_k);
    }
    if (in.count("gate_up") == 0) {
        const at::Tensor logits = linear_projection(in.at("x"), in.at("router"));
        const Routing routing = route(logits, top_k);
        return {{"logits", logits},
                {"probs", router_probabilities(logits)},
                {"topk_index", routing.experts},
                {"topk_weight", routing.weights}};
    }
    const MoeOutput out = moe_block(in.at("x"),
                                    {.router = in.at("router"),
                                     .gate_up = in.at("gate_up"),
                                     .down = in.at("down"),
                                     .shared_gate = in.at("shared_gate"),
                                     .shared_up = in.at("shared_up"),
                                     .shared_down = in.at("shared_down"),
                                     .shared_expert_gate = in.at("shared_expert_gate")},
                                    top_k);
    return {{"y", out.y}, {"topk_index", out.routing.experts}};
}

NamedTensors cross_entropy(const NamedTensors& in, const OpCase& op_case) {
    const bool has_logits = in.count("logits") != 0;
    const at::Tensor& rows = in.at(has_logits ? "logits" : "hidden");
    const at::Tensor targets = op_case.read("targets").to(rows.device());
    const CrossEntropy out = has_logits ? cross_entropy_logits(rows, targets)
                                        : cross_entropy_lm_head(rows, in.at("weight"), targets);
    const auto num_valid = (targets != kIgnoredTarget).sum().item<std::int64_t>();
    return {{"loss", out.loss_sum / num_valid}, {"loss_per_token", out.loss_per_token}};
}

OpFormula moe_formula() {
    return {.inputs = {"x", "router", "gate_up", "down", "shared_gate", "shared_up", "shared_down",
                       "shared_expert_gate"},
            .indexed_inputs = "logits",
            .outputs = {"logits", "probs", "topk_index", "topk_weight", "y", "aux"},
            .others = {"attention_mask"},
            .run = moe};
}

}  // namespace

const std::map<std::string, OpFormula>& op_formulas() {
    static const std::map<std::string, OpFormula> formulas = {
        {"conv1d",
         {.inputs = {"x", "weight", "halo"},
          .outputs = {"y"},
          .others = {"cu_seqlens"},
          .has_bf16_bar = true,
          .run = conv1d}},
        {"gated_rmsnorm",
         {.inputs = {"x", "z", "weight"},
          .outputs = {"y"},
          .others = {"y_bf16"},
          .has_bf16_bar = true,
          .head_dim = 2,
          .run = gated_rmsnorm}},
        {"rmsnorm_zero_centered",
         {.inputs = {"x", "weight"},
          .outputs = {"y"},
          .others = {"y_bf16"},
          .has_bf16_bar = true,
          .run = rmsnorm_zero_centered}},
        {"rope_partial",
         {.inputs = {"q", "k"},
          .outputs = {"q_rot", "k_rot", "cos", "sin"},
          .others = {"position_ids", "inv_freq"},
          .run = rope_partial}},
        {"gated_attention",
         {.inputs = {"qg", "k", "v", "q_norm", "k_norm"},
          .outputs = {"o", "o_ungated", "lse"},
          .others = {"cu_seqlens", "position_ids"},
          .run = gated_attention}},
        {"gdn_gate",
         {.inputs = {"a", "b", "A_log", "dt_bias"},
          .outputs = {"g", "beta"},
          .others = {},
          .run = gdn_gate}},
        {"swiglu_mlp",
         {.inputs = {"x", "gate", "up", "down"},
          .outputs = {"y"},
          .others = {},
          .run = swiglu_mlp}},
        {"moe", moe_formula()},
        {"cross_entropy",
         {.inputs = {"logits", "hidden", "weight"},
          .outputs = {"loss", "loss_per_token"},
          .others = {"targets"},
          .run = cross_entropy}},
    };
    return formulas;
}

}  // namespace hybridcp::cli
