#include "gdn_cuda/gpu_call.h"

#include <ATen/ATen.h>

namespace hybridcp::test {

using at::Tensor;

Tensor on_gpu(const Tensor& x) {
    if (!x.defined()) {
        return x;
    }
    const Tensor storage = at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kCUDA));
    storage.copy_(x);
    return storage;
}

GdnCase on_gpu(const GdnCase& gdn_case) {
    GdnCase moved = gdn_case;
    GdnInputs& in = moved.inputs;
    for (Tensor* x :
         {&in.q, &in.k, &in.v, &in.g, &in.beta, &moved.S_start, &moved.d_o, &moved.dS_end}) {
        *x = on_gpu(*x);
    }
    in.g = in.g.to(at::kFloat);
    return moved;
}

std::shared_ptr<GdnCall> make_gpu_call(const GdnCase& on_device) {
    return make_gdn_call(GdnBackend::kFused, on_device.inputs, on_device.offsets,
                         on_device.options);
}
std::shared_ptr<GdnCall> make_gpu_call(const GdnCase& on_device, const gdn::CudaLimits& limits) {
    return gdn::make_cuda_call(
        gdn::make_problem(on_device.inputs, on_device.offsets, on_device.options), limits);
}

const std::vector<bool>* GpuCall::independent() const {
    return call_->independent();
}
GdnSummary GpuCall::summary() {
    const GdnSummary result = call_->summary();
    return {result.S.cpu(), result.M.cpu()};
}
GdnOutput GpuCall::forward(const Tensor& S_start) {
    const GdnOutput result = call_->forward(on_gpu(S_start));
    return {result.o.cpu(), result.S_end.cpu()};
}
Tensor GpuCall::gradient_summary(const Tensor& d_o) {
    return call_->gradient_summary(on_gpu(d_o)).cpu();
}
void GpuCall::release_intermediates() {
    call_->release_intermediates();
}
GdnGradients GpuCall::backward(const Tensor& d_o, const Tensor& dS_end) {
    const GdnGradients x = call_->backward(on_gpu(d_o), on_gpu(dS_end));
    return {x.dq.cpu(), x.dk.cpu(), x.dv.cpu(), x.dg.cpu(), x.dbeta.cpu(), x.dS_start.cpu()};
}

FusedVariant gpu_variant(double kept_share, const gdn::CudaLimits& limits) {
    return {"cuda", [=](const GdnCase& gdn_case) -> std::shared_ptr<GdnCall> {
                GdnCase c = gdn_case;
                c.options.kept_share = kept_share;
                return std::make_shared<GpuCall>(make_gpu_call(on_gpu(c), limits));
            }};
}

}  // namespace hybridcp::test
