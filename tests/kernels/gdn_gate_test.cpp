// The gates against the golden case, gradients through autograd, and their dtypes.
#include "kernels/gdn/gate.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "hybridcp/error.h"
#include "kernels/gdn_support.h"
#include "model/safetensors.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

TEST(GdnGate, Golden) {
    const SafetensorsFile file(HCP_GOLDEN_DIR "/ops/gdn_gate/h8.safetensors");
    for (const auto& [type, output_bar, gradient_bar] :
         {std::tuple{at::kFloat, 2e-6, 5e-6}, std::tuple{at::kDouble, 1e-7, 1e-7}}) {
        std::vector<Tensor> inputs;
        for (const char* name : {"a", "A_log", "dt_bias", "b"}) {
            inputs.push_back(file.read(name).to(type).requires_grad_(true));
        }
        const std::vector<Tensor> outputs = {gdn_log_decay(inputs[0], inputs[1], inputs[2]),
                                             gdn_beta(inputs[3])};
        const auto error = [&](const Tensor& x, const std::string& name) {
            const Tensor reference = file.read(name).to(at::kDouble);
            return ((x.to(at::kDouble) - reference).norm() / reference.norm()).item<double>();
        };
        EXPECT_LE(error(outputs[0].detach(), "g"), output_bar);
        EXPECT_LE(error(outputs[1].detach(), "beta"), output_bar);
        const auto gradients = torch::autograd::grad(
            outputs, inputs, {file.read("dg").to(type), file.read("dbeta").to(type)});
        EXPECT_LE(error(gradients[0], "da"), gradient_bar);
        EXPECT_LE(error(gradients[1], "dA_log"), gradient_bar);
        EXPECT_LE(error(gradients[2], "ddt_bias"), gradient_bar);
        EXPECT_LE(error(gradients[3], "db"), gradient_bar);
    }
}

TEST(GdnGate, LogDecayIsFp32AndBetaKeepsItsDtype) {
    const Tensor a = at::linspace(-30, 30, 12).view({3, 4}).to(at::kBFloat16);
    const Tensor A_log = at::linspace(-2, 2.7, 4).to(at::kBFloat16);
    const Tensor g = gdn_log_decay(a, A_log, at::ones({4}, at::kBFloat16));
    EXPECT_EQ(g.scalar_type(), at::kFloat);
    const Tensor exact =
        gdn_log_decay(a.to(at::kDouble), A_log.to(at::kDouble), at::ones({4}, at::kDouble));
    EXPECT_LE(((g - exact).norm() / exact.norm()).item<double>(), 2e-6);
    EXPECT_EQ(gdn_beta(a).scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(gdn_beta(a), at::sigmoid(a)));
    EXPECT_TRUE((g <= 0).all().item<bool>());
}

TEST(GdnGate, RefusesOtherShapes) {
    const Tensor a = at::zeros({3, 4});
    EXPECT_THROW((void)gdn_log_decay(a, at::zeros({3}), at::zeros({3})), UsageError);
    EXPECT_THROW((void)gdn_log_decay(a, at::zeros({4}), at::zeros({3})), UsageError);
    EXPECT_THROW((void)gdn_log_decay(a, at::zeros({1, 4}), at::zeros({1, 4})), UsageError);
}

}  // namespace
}  // namespace hybridcp::test
