#include "kernels/loss/fused_loss.h"

#include "hybridcp/error.h"
#include "kernels/loss/loss_kernels.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/simd/dispatch.h"

namespace hybridcp {

HCP_DECLARE_KERNELS(LossKernels, loss_kernels)

namespace {

/// The arguments in the form of the kernels; holds what they point to.
struct Call {
    Call(const at::Tensor& logits_in, const at::Tensor& targets_in, const at::Tensor& statistics_in)
        : logits(as_rows(logits_in)),
          targets(targets_in.contiguous()),
          statistics(statistics_in),
          loss(at::empty({logits.size(0)}, logits.options().dtype(at::kFloat))),
          arguments{.element = element_of(logits),
                    .vocabulary = logits.size(1),
                    .logits = read_rows(logits),
                    .targets = targets.const_data_ptr<std::int64_t>(),
                    .loss = loss.mutable_data_ptr<float>(),
                    .statistics = statistics.data_ptr<float>()} {}

    template <typename Body>
    void for_each_rows(const Body& body) const {
        for_each_block(logits.size(0), rows_of_task(logits.size(1), 1),
                       [&](Range rows, std::int64_t /*block*/, int /*thread*/) { body(rows); });
    }

    at::Tensor logits, targets, statistics, loss;
    LossRows arguments;
};

at::Tensor empty_statistics(const at::Tensor& logits) {
    return at::empty({logits.size(0), 2}, logits.options().dtype(at::kFloat));
}

}  // namespace

RowLosses fused_row_losses(const at::Tensor& logits, const at::Tensor& targets) {
    const at::Tensor statistics = empty_statistics(logits);
    const Call call(logits, targets, statistics);
    const LossKernels& kernels = loss_kernels(selected_isa());
    call.for_each_rows([&](Range rows) { kernels.loss(call.arguments, rows); });
    return {call.loss, statistics};
}

at::Tensor fused_row_gradients(const at::Tensor& logits,
                               const at::Tensor& targets,
                               const at::Tensor& statistics,
                               const at::Tensor& scale) {
    const Call call(logits, targets, statistics);
    const at::Tensor wide_scale = scale.to(at::kFloat);
    const float factor = *wide_scale.const_data_ptr<float>();
    at::Tensor gradients = at::empty(logits.sizes(), logits.options());
    const Rows out = write_rows(gradients);
    const LossKernels& kernels = loss_kernels(selected_isa());
    call.for_each_rows([&](Range rows) { kernels.gradient(call.arguments, out, factor, rows); });
    return gradients;
}

at::Tensor fused_losses_to_gradients(at::Tensor& logits, const at::Tensor& targets) {
    HCP_CHECK(logits.is_contiguous(), "fused cross-entropy: the logits must be contiguous");
    const Call call(logits, targets, empty_statistics(logits));
    const Rows out = write_rows(logits);
    const LossKernels& kernels = loss_kernels(selected_isa());
    call.for_each_rows([&](Range rows) {
        for (std::int64_t row = rows.begin; row < rows.end; ++row) {  // each from the cache
            kernels.loss(call.arguments, {row, row + 1});
            kernels.gradient(call.arguments, out, 1, {row, row + 1});
        }
    });
    return call.loss;
}

}  // namespace hybridcp
