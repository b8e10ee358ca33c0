#include "train/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "hybridcp/error.h"

namespace hybridcp {
namespace {

std::vector<ParameterPiece> make_parameters() {
    const auto options = at::TensorOptions(at::kFloat).requires_grad(false);
    std::vector<NamedParameter> parameters{{"matrix", at::randn({3, 5}, options)},
                                           {"vector", at::randn({7}, options)},
                                           {"conv", at::randn({4, 1, 4}, options)}};
    for (NamedParameter& parameter : parameters) {
        parameter.value.set_requires_grad(true);
    }
    return whole_pieces(parameters);
}

/// AdamW of one number in fp64, by the formulas of the header.
struct Reference {
    double p, m = 0, v = 0;
    void step(double g, int n, double lr, double decay) {
        p *= 1 - lr * decay;
        m = 0.9 * m + 0.1 * g;
        v = 0.95 * v + 0.05 * g * g;
        const double m_hat = m / (1 - std::pow(0.9, n));
        const double v_hat = v / (1 - std::pow(0.95, n));
        p -= lr * m_hat / (std::sqrt(v_hat) + 1e-8);
    }
};

TEST(AdamW, FollowsALoopInFp64WithClipping) {
    at::manual_seed(1);
    auto parameters = make_parameters();
    std::vector<std::vector<Reference>> references;
    for (const auto& parameter : parameters) {
        auto& list = references.emplace_back();
        const at::Tensor flat = parameter.value.detach().reshape({-1});
        for (std::int64_t i = 0; i < flat.numel(); ++i) {
            list.push_back({.p = flat[i].item<double>()});
        }
    }
    AdamW optimizer(parameters, {});
    for (int n = 1; n <= 20; ++n) {
        const double lr = 0.01 * n;
        double squares = 0;
        std::vector<at::Tensor> grads;
        for (auto& parameter : parameters) {
            grads.push_back(at::randn_like(parameter.value.detach()) * (n % 3 == 0 ? 0.01 : 3.0));
            parameter.value.mutable_grad() = grads.back().clone();
            squares += grads.back().to(at::kDouble).square().sum().item<double>();
        }
        const double norm = clip_gradients(parameters, 1.0);
        EXPECT_NEAR(norm, std::sqrt(squares), 1e-12 * norm);
        EXPECT_NEAR(gradient_norm(parameters), std::min(norm, 1.0), 1e-5);
        optimizer.step(lr);
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            const at::Tensor grad = grads[i].reshape({-1}).to(at::kDouble);
            for (std::int64_t j = 0; j < grad.numel(); ++j) {
                references[i][static_cast<std::size_t>(j)].step(
                    grad[j].item<double>() * std::min(1.0, 1.0 / (norm + 1e-6)), n, lr,
                    parameters[i].name == "vector" ? 0.0 : 0.1);
            }
        }
    }
    EXPECT_EQ(optimizer.num_updates(), 20);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const at::Tensor flat = parameters[i].value.detach().reshape({-1});
        for (std::int64_t j = 0; j < flat.numel(); ++j) {
            EXPECT_NEAR(flat[j].item<double>(), references[i][static_cast<std::size_t>(j)].p, 5e-6)
                << parameters[i].name << " " << j;
        }
    }
}

TEST(AdamW, NoClippingLeavesGradientsAndAMissingOneIsRefused) {
    auto parameters = make_parameters();
    AdamW optimizer(parameters, {});
    EXPECT_THROW(optimizer.step(0.1), CheckError);
    for (auto& parameter : parameters) {
        parameter.value.mutable_grad() = at::full_like(parameter.value.detach(), 5.0);
    }
    EXPECT_NEAR(clip_gradients(parameters, 0.0), 5.0 * std::sqrt(38.0), 1e-9);
    EXPECT_EQ(parameters[1].value.grad()[0].item<float>(), 5.0F);
}

TEST(Schedule, WarmsUpAndDecaysToTheMinimumAtTheLastStep) {
    const ScheduleOptions cosine{.learning_rate = 1e-3, .steps = 30, .warmup_steps = 5};
    EXPECT_DOUBLE_EQ(learning_rate_at(cosine, 0), 2e-4);
    EXPECT_DOUBLE_EQ(learning_rate_at(cosine, 4), 1e-3);
    EXPECT_NEAR(learning_rate_at(cosine, 29), 1e-4, 1e-18);
    EXPECT_NEAR(learning_rate_at(cosine, 16),
                1e-3 * (0.1 + 0.9 * 0.5 * (1 + std::cos(M_PI * 12 / 25))), 1e-18);
    ScheduleOptions linear = cosine;
    linear.decay = "linear";
    EXPECT_NEAR(learning_rate_at(linear, 16), 1e-3 * (0.1 + 0.9 * 13 / 25), 1e-18);
    EXPECT_NEAR(learning_rate_at(linear, 29), 1e-4, 1e-18);
    ScheduleOptions constant = cosine;
    constant.decay = "constant";
    EXPECT_DOUBLE_EQ(learning_rate_at(constant, 29), 1e-3);
    EXPECT_DOUBLE_EQ(learning_rate_at({.steps = 3, .warmup_steps = 10}, 2), 3e-4);
    EXPECT_DOUBLE_EQ(learning_rate_at({.steps = 1, .warmup_steps = 0}, 0), 1e-4);
}

}  // namespace
}  // namespace hybridcp
