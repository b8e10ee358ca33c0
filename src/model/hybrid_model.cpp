// Legend: T local tokens, d hidden, Hk/Hv GDN key and value heads, K/V their dims, Hq/Hkv attention
// heads, D head dim.
#include <ATen/ops/aminmax.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/sigmoid.h>
#include <fmt/ranges.h>

#include <cmath>

#include "core/memory_class.h"
#include "hybridcp/error.h"
#include "hybridcp/model.h"
#include "hybridcp/parameter_residency.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gdn/gate.h"
#include "kernels/linear/linear.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/rotary/rotary.h"
#include "model/block.h"
#include "model/checkpoint_names.h"
#include "ops/context_parallel.h"
#include "ops/conversion.h"
#include "ops/segment.h"
#include "ops/token_gather.h"

namespace hybridcp {

namespace {

void check_token_ids(const at::Tensor& token_ids, const BatchPlan& plan, std::int64_t vocab_size) {
    HCP_CHECK_EQ(token_ids.dim(), 1, "token ids are the local tokens in one row");
    HCP_CHECK_EQ(token_ids.size(0), plan.num_local_tokens(), "number of local token ids");
    if (token_ids.is_cpu() && token_ids.numel() > 0) {  // on other devices it would wait for them
        const auto [least, largest] = at::aminmax(token_ids);
        HCP_CHECK(least.item<std::int64_t>() >= 0 && largest.item<std::int64_t>() < vocab_size,
                  "token ids from {} to {} do not fit the vocabulary of {}",
                  least.item<std::int64_t>(), largest.item<std::int64_t>(), vocab_size);
    }
}

void add_to(at::Tensor& sum, const at::Tensor& term) {
    if (term.defined()) {
        sum = sum.defined() ? sum + term : term;
    }
}

}  // namespace

HybridModel::HybridModel(ModelConfig config,
                         std::vector<NamedParameter> parameters,
                         at::ScalarType compute_dtype)
    : config_(std::move(config)),
      parameters_(std::move(parameters)),
      compute_dtype_(compute_dtype) {
    if (compute_dtype != at::kFloat && compute_dtype != at::kBFloat16 &&
        compute_dtype != at::kDouble) {
        throw UsageError(fmt::format("a model cannot compute in {}: choose fp32 or bf16",
                                     at::toString(compute_dtype)));
    }
    const std::vector<ParameterShape> expected = parameter_shapes(config_);
    HCP_CHECK_EQ(parameters_.size(), expected.size(), "number of parameters of the model");
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const auto& [name, value] = parameters_[i];
        HCP_CHECK_EQ(name, expected[i].name, "parameter {} of the model", i);
        HCP_CHECK(value.sizes() == at::IntArrayRef(expected[i].shape),
                  "parameter {} must have shape [{}]", name, fmt::join(expected[i].shape, ", "));
        HCP_CHECK(value.is_leaf() &&
                      (value.scalar_type() == at::kFloat || value.scalar_type() == compute_dtype),
                  "parameter {} must be a leaf in fp32 or the compute dtype", name);
        index_by_name_.emplace(name, i);
    }
}

const at::Tensor& HybridModel::parameter(const std::string& name) const {
    const auto found = index_by_name_.find(name);
    if (found == index_by_name_.end()) {
        throw UsageError(fmt::format("the model has no parameter {}", name));
    }
    return parameters_[found->second].value;
}

// Weights enter the kernels as they are kept (in fp64 for fp64), which round them at use and sum
// their gradients unrounded.
at::Tensor HybridModel::exact_weight(const std::string& name) const {
    const at::Tensor& value = parameter(name);
    return compute_dtype_ == at::kDouble ? value.to(at::kDouble) : value;
}

at::Tensor HybridModel::head_weight() const {
    return exact_weight(config_.tie_word_embeddings ? kEmbeddingName : kHeadName);
}

at::Tensor HybridModel::weight(std::int64_t layer, const std::string& suffix) const {
    return exact_weight(layer_parameter_name(layer, suffix));
}

Sharded HybridModel::linear_attention(const Sharded& x,
                                      std::int64_t layer,
                                      const CpContext& context) const {
    const std::int64_t tokens = x.local.size(0);
    const std::int64_t key_heads = config_.linear_num_key_heads;
    const std::int64_t value_heads = config_.linear_num_value_heads;
    const std::int64_t key_dim = config_.linear_key_head_dim;
    const std::int64_t value_dim = config_.linear_value_head_dim;
    const auto project = [&](const char* name) {
        return linear_projection(x.local, weight(layer, name));
    };
    const at::Tensor qkv = project("linear_attn.in_proj_qkv.weight");
    const at::Tensor z = project("linear_attn.in_proj_z.weight");
    const at::Tensor b = project("linear_attn.in_proj_b.weight");
    const at::Tensor a = project("linear_attn.in_proj_a.weight");

    const at::Tensor conv_weight = weight(layer, "linear_attn.conv1d.weight").squeeze(1);
    const std::vector<at::Tensor> split =
        causal_conv_silu_cp(x.with(qkv), conv_weight, context)
            .local.split_with_sizes(
                {key_heads * key_dim, key_heads * key_dim, value_heads * value_dim}, 1);
    const GdnShards inputs{.q = x.with(split[0].reshape({tokens, key_heads, key_dim})),
                           .k = x.with(split[1].reshape({tokens, key_heads, key_dim})),
                           .v = x.with(split[2].reshape({tokens, value_heads, value_dim})),
                           .g = x.with(gdn_log_decay(a, weight(layer, "linear_attn.A_log"),
                                                     weight(layer, "linear_attn.dt_bias"))),
                           .beta = x.with(gdn_beta(b))};
    const at::Tensor o_THV =
        gated_delta_rule_cp(inputs, GdnOptions{.chunk_size = gdn_chunk_size}, context).o.local;
    const at::Tensor gated_THV =
        rms_norm_gated(o_THV, z.reshape({tokens, value_heads, value_dim}),
                       weight(layer, "linear_attn.norm.weight"), config_.rms_norm_eps);
    return x.with(linear_projection(gated_THV.reshape({tokens, value_heads * value_dim}),
                                    weight(layer, "linear_attn.out_proj.weight")));
}

Sharded HybridModel::linear_mixer(const Sharded& x,
                                  std::int64_t layer,
                                  const CpContext& context) const {
    const CpContext linear = linear_attention_context(context);
    const bool gathers = context.plan->linear && !context.plan->to_linear;
    if (!gathers) {
        return linear_attention(x, layer, linear);
    }
    // gather_hidden: the whole layer over all tokens on every rank, of which each keeps its own.
    const Sharded all{
        gather_tokens(x, {.op = "gather_hidden", .dtype = x.local.scalar_type()}, context),
        linear.plan->tag};
    return x.with(
        linear_attention(all, layer, linear).local.index_select(0, context.plan->flat_indices));
}

Sharded HybridModel::full_attention(const Sharded& x,
                                    std::int64_t layer,
                                    const RotaryTables& rotary,
                                    const CpContext& context) const {
    const std::int64_t tokens = x.local.size(0);
    const std::int64_t query_heads = config_.num_attention_heads;
    const std::int64_t kv_heads = config_.num_key_value_heads;
    const std::int64_t dim = config_.head_dim;
    const auto project = [&](const char* name, std::int64_t heads, std::int64_t head_dim) {
        return linear_projection(x.local, weight(layer, name)).reshape({tokens, heads, head_dim});
    };
    // Each query head's rows are its query, then its output gate.
    const std::vector<at::Tensor> query_and_gate =
        project("self_attn.q_proj.weight", query_heads, 2 * dim).split(dim, -1);
    const at::Tensor k_projected = project("self_attn.k_proj.weight", kv_heads, dim);
    const at::Tensor v_THD = project("self_attn.v_proj.weight", kv_heads, dim);

    const auto normalise_and_rotate = [&](const at::Tensor& heads, const char* norm) {
        return x.with(apply_partial_rotary(
            rms_norm_zero_centered(heads, weight(layer, norm), config_.rms_norm_eps), rotary));
    };
    const Sharded q_THD = normalise_and_rotate(query_and_gate[0], "self_attn.q_norm.weight");
    const Sharded k_THD = normalise_and_rotate(k_projected, "self_attn.k_norm.weight");
    const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
    const at::Tensor o_THD = causal_attention_cp(q_THD, k_THD, x.with(v_THD), scale, context).local;
    const at::Tensor gated_THD = o_THD * at::sigmoid(query_and_gate[1]);
    return x.with(linear_projection(gated_THD.reshape({tokens, query_heads * dim}),
                                    weight(layer, "self_attn.o_proj.weight")));
}

Sharded HybridModel::mixer(const Sharded& x, std::int64_t layer, const CpContext& context) const {
    HCP_CHECK(layer >= 0 && layer < config_.num_layers(), "layer {} of {}", layer,
              config_.num_layers());
    if (config_.layer_types[static_cast<std::size_t>(layer)] == LayerType::kLinearAttention) {
        return linear_mixer(x, layer, context);
    }
    const RotaryTables rotary = make_rotary_tables(context.plan->positions, config_.rotary_dim(),
                                                   config_.rope_theta, compute_dtype_);
    return full_attention(x, layer, rotary, context);
}

at::Tensor HybridModel::embed(const at::Tensor& token_ids) const {
    if (residency != nullptr) {
        residency->before_forward(0);
    }
    const MemoryScope scope(MemoryClass::kStream);
    const at::Tensor rows = embed_tokens(exact_weight(kEmbeddingName), token_ids, compute_dtype_);
    if (residency != nullptr) {
        residency->after_forward(0);
    }
    return rows;
}

ForwardResult HybridModel::forward(const at::Tensor& token_ids,
                                   const CpContext& context,
                                   bool keep_per_layer) const {
    HCP_CHECK(context.plan != nullptr, "forward needs the batch's plan");
    check_token_ids(token_ids, *context.plan, config_.vocab_size);
    // The stream between layers stays in fp32: what a layer adds is rounded, their sum is not.
    const LayoutTag stream_layout = context.plan->tag;
    Sharded hidden{embed(token_ids), stream_layout};
    const RotaryTables rotary = make_rotary_tables(context.plan->positions, config_.rotary_dim(),
                                                   config_.rope_theta, compute_dtype_);
    ForwardResult result;
    for (std::int64_t layer = 0; layer < config_.num_layers(); ++layer) {
        const Block block{.layer = layer,
                          .rotary = rotary,
                          .context = context,
                          .keep_router_logits = keep_per_layer && config_.has_experts()};
        if (context.parallel.elide_conversions) {  // layers that agree share a conversion
            hidden = convert(hidden, mixer_layout(config_, layer, context), context);
        }
        const BlockOutput output = run_block(hidden, block);
        hidden = hidden.with(output.hidden);
        add_to(result.expert_counts, output.expert_counts);
        add_to(result.probability_sums, output.probability_sums);
        if (keep_per_layer) {
            const at::NoGradGuard no_grad;
            const auto in_stream = [&](const at::Tensor& local) {
                return convert(hidden.with(local.detach()), stream_layout, context).local;
            };
            result.per_layer.push_back(in_stream(hidden.local));
            if (block.keep_router_logits) {
                result.router_logits.push_back(in_stream(output.router_logits));
            }
        }
    }
    hidden = convert(hidden, stream_layout, context);
    const auto final_norm = [this](const std::vector<at::Tensor>& inputs, ExchangeTape* /*tape*/) {
        return std::vector<at::Tensor>{
            rms_norm_zero_centered(inputs[0], exact_weight(kFinalNormName), config_.rms_norm_eps)
                .to(compute_dtype_)};
    };
    const SegmentOptions head{.hooks = hooks_of_unit(1 + config_.num_layers())};
    result.hidden = run_segment({hidden.local}, final_norm, head).front();
    return result;
}

std::optional<std::int64_t> first_non_finite_layer(const ForwardResult& result) {
    for (std::size_t layer = 0; layer < result.per_layer.size(); ++layer) {
        if (!at::isfinite(result.per_layer[layer]).all().item<bool>()) {
            return static_cast<std::int64_t>(layer);
        }
    }
    return std::nullopt;
}

}  // namespace hybridcp
