// Calls of the Hopper backend on a GPU, for tests (built with HCP_CUDA).
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "kernels/gdn/backends.h"
#include "kernels/gdn_fused_variants.h"

namespace hybridcp::test {

[[nodiscard]] at::Tensor on_gpu(const at::Tensor& x);  // strides are part of a case
[[nodiscard]] GdnCase on_gpu(const GdnCase& gdn_case);

/// As a user makes it; and with limits of its own.
[[nodiscard]] std::shared_ptr<GdnCall> make_gpu_call(const GdnCase& on_device);
[[nodiscard]] std::shared_ptr<GdnCall> make_gpu_call(const GdnCase& on_device,
                                                     const gdn::CudaLimits& limits);

/// A call on the GPU whose arguments and results are on the CPU.
class GpuCall final : public GdnCall {
  public:
    explicit GpuCall(std::shared_ptr<GdnCall> call) : call_(std::move(call)) {}
    [[nodiscard]] const std::vector<bool>* independent() const override;
    [[nodiscard]] GdnSummary summary() override;
    [[nodiscard]] GdnOutput forward(const at::Tensor& S_start) override;
    [[nodiscard]] at::Tensor gradient_summary(const at::Tensor& d_o) override;
    void release_intermediates() override;
    [[nodiscard]] GdnGradients backward(const at::Tensor& d_o, const at::Tensor& dS_end) override;

  private:
    std::shared_ptr<GdnCall> call_;
};

[[nodiscard]] FusedVariant gpu_variant(double kept_share = 1.0, const gdn::CudaLimits& limits = {});

}  // namespace hybridcp::test
