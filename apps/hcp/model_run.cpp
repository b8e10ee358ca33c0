#include "hcp/model_run.h"

#include <ATen/ATen.h>

#include "kernels/linear/linear.h"
#include "kernels/loss/cross_entropy.h"
#include "ops/batch_plan.h"
#include "ops/context_parallel.h"
#include "train/gradient_reduction.h"
#include "train/router_balance.h"

namespace hybridcp::cli {

namespace {

/// loss, and its parts where there are two.
void add_losses(const at::Tensor& ce_loss,
                std::optional<double> aux_loss,
                double coefficient,
                ModelResults& results) {
    results["loss"] = ce_loss;
    if (aux_loss) {
        results["ce_loss"] = ce_loss;
        results["aux_loss"] = at::full({}, *aux_loss, ce_loss.options());
        results["loss"] = ce_loss + coefficient * results["aux_loss"];
    }
}

at::Device device_of(const HybridModel& model) {
    return model.parameters().front().value.device();
}

BatchPlan plan_batch(const HybridModel& model,
                     const TokenBatch& batch,
                     const Parallel& parallel,
                     const Mesh& mesh) {
    return make_batch_plan({.document_lengths = batch.document_lengths,
                            .parallel = parallel,
                            .rank = mesh.cp->rank(),
                            .conv_width = static_cast<int>(model.config().linear_conv_kernel_dim),
                            .device = device_of(model)});
}

}  // namespace

ModelResults run_model(const HybridModel& model,
                       const TokenBatch& batch,
                       const Parallel& parallel,
                       const Mesh& mesh) {
    for (const NamedParameter& parameter : model.parameters()) {
        at::Tensor value = parameter.value;
        value.mutable_grad().reset();
    }
    const at::Device device = device_of(model);
    const BatchPlan plan = plan_batch(model, batch, parallel, mesh);
    mesh.cp->agree(plan.tag.hash, "the batch and its layout");
    const CpContext context{.group = mesh.cp.get(), .plan = &plan, .parallel = parallel};
    const at::Tensor token_ids = batch.token_ids.to(device).index_select(0, plan.flat_indices);
    const at::Tensor targets = batch.targets.to(device).index_select(0, plan.flat_indices);

    const ForwardResult forward = model.forward(token_ids, context, /*keep_per_layer=*/true);
    const CrossEntropy loss = cross_entropy_lm_head(forward.hidden, model.head_weight(), targets);
    const auto num_labels = batch.targets.ne(kIgnoredTarget).sum().item<std::int64_t>();
    const double scale = num_labels > 0 ? 1.0 / static_cast<double>(num_labels) : 0.0;
    RouterBalance balance(model, /*num_micro_batches=*/1, *mesh.world);
    run_backward(loss.loss_sum, scale, forward, balance.add(forward));
    all_reduce_gradients(model.parameters(), *mesh.world);

    const at::NoGradGuard no_grad;
    const auto gather = [&](const at::Tensor& local) {
        return gather_flat(local.detach(), plan.layout, *mesh.cp);
    };
    const std::optional<double> aux_loss = balance.finish();
    at::Tensor total = loss.loss_sum.detach().to(at::kDouble);
    if (mesh.world->size() > 1) {
        mesh.world->all_reduce_sum("loss", total);
    }
    ModelResults results;
    add_losses(total * scale, aux_loss, model.config().router_aux_loss_coef, results);
    results["loss_per_token"] = gather(loss.loss_per_token);
    for (std::size_t layer = 0; layer < forward.per_layer.size(); ++layer) {
        results[fmt::format("hidden.{}", layer)] = gather(forward.per_layer[layer]);
    }
    for (std::size_t layer = 0; layer < forward.router_logits.size(); ++layer) {
        results[fmt::format("router_logits.{}", layer)] = gather(forward.router_logits[layer]);
    }
    results["hidden.norm"] = gather(forward.hidden);
    results["logits"] = gather(linear_projection(forward.hidden, model.head_weight()));
    for (const NamedParameter& parameter : model.parameters()) {
        results["grad." + parameter.name] = parameter.value.grad().clone();
    }
    return results;
}

}  // namespace hybridcp::cli
