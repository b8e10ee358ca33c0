// The whole model on one rank against Hugging Face's numbers (golden/README.md sections 4 and 8).
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/files.h"
#include "hybridcp/error.h"
#include "hybridcp/model.h"
#include "kernels/loss/cross_entropy.h"
#include "kernels/moe/router.h"
#include "model/safetensors.h"
#include "model/test_files.h"
#include "ops/context_parallel.h"

namespace hybridcp {
namespace {

using testing::golden_model;
using testing::mentions;
using testing::message_of;

constexpr double kHiddenBar = 3e-5;
constexpr double kLossBar = 5e-6;
constexpr double kLossPerTokenBar = 5e-5;
constexpr double kGradientBar = 5e-4;
constexpr double kAllGradientsBar = 1e-4;

struct GoldenCase {
    const char* model;
    const char* name;
};

void PrintTo(const GoldenCase& golden, std::ostream* stream) {
    *stream << golden.model << "/" << golden.name;
}

double norm_of(const at::Tensor& x) {
    return x.detach().to(at::kDouble).norm().item<double>();
}

double relative_l2(const at::Tensor& x, const at::Tensor& reference) {
    const at::Tensor flat = reference.reshape(x.sizes()).to(at::kDouble);
    return norm_of(x.to(at::kDouble) - flat) / norm_of(flat);
}

std::vector<std::int64_t> document_lengths(const SafetensorsFile& batch) {
    std::vector<std::int64_t> lengths;
    if (batch.contains("cu_seqlens")) {
        const at::Tensor offsets = batch.read("cu_seqlens");
        for (std::int64_t doc = 0; doc + 1 < offsets.size(0); ++doc) {
            lengths.push_back((offsets[doc + 1] - offsets[doc]).item<int>());
        }
    } else {
        const auto& shape = batch.entries().at("input_ids").shape;
        lengths.assign(static_cast<std::size_t>(shape[0]), shape[1]);
    }
    return lengths;
}

BatchPlan plan_of(const std::vector<std::int64_t>& lengths) {
    return make_batch_plan(Layout::make({.num_ranks = 1, .document_lengths = lengths}), 0, 4,
                           at::kCPU);
}

HybridModel load_model(const std::string& folder, at::ScalarType compute_dtype) {
    const ModelConfig config = read_model_config(folder);
    return {config, load_parameters(folder, config, at::kCPU), compute_dtype};
}

class GoldenForward : public ::testing::TestWithParam<GoldenCase> {
  protected:
    std::string folder_ = golden_model(GetParam().model);
    SafetensorsFile batch_{folder_ + "/" + GetParam().name + "/batch.safetensors"};
    SafetensorsFile expected_{folder_ + "/" + GetParam().name + "/expected.safetensors"};
    BatchPlan plan_ = plan_of(document_lengths(batch_));
    CpContext context_{.group = nullptr, .plan = &plan_, .parallel = {}};
    at::Tensor ids_ = batch_.read("input_ids").flatten();
    at::Tensor targets_ = batch_.read("targets").flatten();
};

void expect_gradients(const HybridModel& model,
                      const SafetensorsFile& expected,
                      const std::string& prefix) {
    double squared_error = 0;
    double squared_norm = 0;
    for (const auto& [name, value] : model.parameters()) {
        ASSERT_TRUE(value.grad().defined()) << name;
        std::string stored = name;
        if (name.starts_with("model.")) {
            stored = prefix + name.substr(6);
        }
        const at::Tensor reference = expected.read("grad." + stored);
        EXPECT_EQ(value.grad().sizes(), reference.sizes()) << name;
        EXPECT_LE(relative_l2(value.grad(), reference), kGradientBar) << name;
        squared_error += std::pow(norm_of(value.grad() - reference), 2);
        squared_norm += std::pow(norm_of(reference), 2);
    }
    EXPECT_LE(std::sqrt(squared_error / squared_norm), kAllGradientsBar);
}

/// The weight of the load-balancing loss that the case was recorded with.
double recorded_coefficient(const std::string& folder, const std::string& name) {
    const nlohmann::json manifest = nlohmann::json::parse(read_file(folder + "/manifest.json"));
    return manifest.at("cases").at(name).at("router_aux_loss_coef").get<double>();
}

/// coefficient * load-balancing loss, whose value and router logits are compared.
at::Tensor expect_router(const HybridModel& model,
                         const ForwardResult& result,
                         const SafetensorsFile& expected,
                         double coefficient) {
    const std::int64_t layers = model.config().num_layers();
    EXPECT_EQ(result.router_logits.size(), static_cast<std::size_t>(layers));
    for (std::size_t layer = 0; layer < result.router_logits.size(); ++layer) {
        EXPECT_LE(relative_l2(result.router_logits[layer],
                              expected.read(fmt::format("router_logits.{}", layer))),
                  kHiddenBar);
    }
    const at::Tensor rows = at::full({}, layers * result.hidden.size(0), at::kLong);
    const at::Tensor aux =
        load_balancing_coefficients(result.expert_counts, rows).dot(result.probability_sums);
    EXPECT_NEAR(aux.item<double>(), expected.read("aux_loss").item<double>(), kLossBar);
    return coefficient * aux;
}

TEST_P(GoldenForward, MatchesHuggingFaceInFp32) {
    const HybridModel model = load_model(folder_, at::kFloat);
    const ForwardResult result = model.forward(ids_, context_, /*keep_per_layer=*/true);
    ASSERT_EQ(result.per_layer.size(), static_cast<std::size_t>(model.config().num_layers()));
    for (std::size_t layer = 0; layer < result.per_layer.size(); ++layer) {
        const std::string name = fmt::format("hidden.{}", layer);
        if (expected_.contains(name)) {
            EXPECT_LE(relative_l2(result.per_layer[layer], expected_.read(name)), kHiddenBar)
                << name;
        }
    }
    EXPECT_EQ(first_non_finite_layer(result), std::nullopt);
    EXPECT_LE(relative_l2(result.hidden, expected_.read("hidden.norm")), kHiddenBar);
    const at::Tensor head = model.head_weight();
    if (expected_.contains("logits")) {
        const at::Tensor logits = result.hidden.detach().matmul(head.detach().t());
        EXPECT_LE(relative_l2(logits, expected_.read("logits")), kHiddenBar);
    }
    const CrossEntropy loss = cross_entropy_lm_head(result.hidden, head, targets_);
    const at::Tensor per_token = expected_.read("loss_per_token").flatten();
    EXPECT_LE((loss.loss_per_token - per_token).abs().max().item<double>(), kLossPerTokenBar);
    const at::Tensor mean = loss.loss_sum / targets_.ne(kIgnoredTarget).sum();
    EXPECT_NEAR(mean.item<double>(), expected_.read("ce_loss").item<double>(), kLossBar);
    at::Tensor total = mean;
    if (model.config().has_experts()) {
        total = mean + expect_router(model, result, expected_,
                                     recorded_coefficient(folder_, GetParam().name));
    }
    EXPECT_NEAR(total.item<double>(), expected_.read("loss").item<double>(), kLossBar);
    total.backward();
    const bool nested = expected_.contains("grad.model.language_model.norm.weight");
    expect_gradients(model, expected_, nested ? "model.language_model." : "model.");
}

/// The models with BF16 weights, whose manifests record transformers' own bf16 error.
class GoldenBf16Forward : public GoldenForward {};

TEST_P(GoldenBf16Forward, IsWithinTwiceTransformersOwnError) {
    const nlohmann::json manifest = nlohmann::json::parse(read_file(folder_ + "/manifest.json"));
    const nlohmann::json& golden = manifest.at("cases").at(GetParam().name);
    const double bar =
        2 * golden.at("transformers_bfloat16").at("hidden_norm_rel_l2").get<double>();
    const HybridModel model = load_model(folder_, at::kBFloat16);
    const ForwardResult result = model.forward(ids_, context_);
    EXPECT_EQ(result.hidden.scalar_type(), at::kBFloat16);
    EXPECT_LE(relative_l2(result.hidden, expected_.read("hidden.norm")), bar);
    const CrossEntropy loss = cross_entropy_lm_head(result.hidden, model.head_weight(), targets_);
    (loss.loss_sum / targets_.ne(kIgnoredTarget).sum()).backward();
    for (const auto& [name, value] : model.parameters()) {
        EXPECT_EQ(value.grad().scalar_type(), at::kFloat) << name;
        EXPECT_TRUE(at::isfinite(value.grad()).all().item<bool>()) << name;
        EXPECT_GT(norm_of(value.grad()), 0.0) << name;
    }
}

INSTANTIATE_TEST_SUITE_P(Models,
                         GoldenForward,
                         ::testing::Values(GoldenCase{"dense_tiny", "b1_t256"},
                                           GoldenCase{"dense_tiny", "packed"},
                                           GoldenCase{"dense_tiny8", "b1_t100"},
                                           GoldenCase{"dense_mini_bf16", "b2_t70"},
                                           GoldenCase{"vl_mini", "b2_t33"},
                                           GoldenCase{"moe_tiny", "b2_t130"},
                                           GoldenCase{"moe_tiny", "packed"},
                                           GoldenCase{"moe_vl_mini", "b2_t33"}));

INSTANTIATE_TEST_SUITE_P(Models,
                         GoldenBf16Forward,
                         ::testing::Values(GoldenCase{"dense_tiny8", "b1_t100"},
                                           GoldenCase{"dense_mini_bf16", "b2_t70"}));

ModelConfig small_config() {
    return read_model_config(golden_model("dense_mini_bf16"));
}

class ForwardOf : public ::testing::TestWithParam<const char*> {
  protected:
    ModelConfig config_ = read_model_config(golden_model(GetParam()));
};
INSTANTIATE_TEST_SUITE_P(Models, ForwardOf, ::testing::Values("dense_mini_bf16", "moe_vl_mini"));

TEST_P(ForwardOf, DocumentsOfAnyLengthDoNotSeeEachOther) {
    const HybridModel model = HybridModel::random(config_, 3, at::kDouble, at::kCPU);
    const std::vector<std::int64_t> lengths{0, 1, 65, 0, 2, 63};
    const at::Tensor ids = at::arange(131).mul(37).remainder(64);
    const BatchPlan packed = plan_of(lengths);
    const at::Tensor together =
        model.forward(ids, {.plan = &packed, .parallel = {}}).hidden.detach();
    std::int64_t begin = 0;
    for (const std::int64_t length : lengths) {
        const BatchPlan plan = plan_of({length});
        const at::Tensor alone =
            model.forward(ids.slice(0, begin, begin + length), {.plan = &plan, .parallel = {}})
                .hidden.detach();
        const at::Tensor part = together.slice(0, begin, begin + length);
        EXPECT_TRUE(at::allclose(alone, part, 1e-10, 1e-12))
            << "the document of " << length << " tokens";
        begin += length;
    }
}

TEST_P(ForwardOf, ABatchWithoutTokensGivesZeroGradients) {
    const HybridModel model = HybridModel::random(config_, 3, at::kFloat, at::kCPU);
    const BatchPlan plan = plan_of({0, 0});
    const at::Tensor ids = at::empty({0}, at::kLong);
    const ForwardResult result = model.forward(ids, {.plan = &plan, .parallel = {}});
    EXPECT_EQ(result.hidden.sizes(), at::IntArrayRef({0, config_.hidden_size}));
    const CrossEntropy loss = cross_entropy_lm_head(result.hidden, model.head_weight(), ids);
    loss.loss_sum.backward();
    for (const auto& [name, value] : model.parameters()) {
        ASSERT_TRUE(value.grad().defined()) << name;
        EXPECT_EQ(norm_of(value.grad()), 0.0) << name;
    }
}

TEST(Forward, ExpertsTrainInBf16) {
    const HybridModel model = load_model(golden_model("moe_tiny"), at::kBFloat16);
    const SafetensorsFile batch(golden_model("moe_tiny") + "/b2_t130/batch.safetensors");
    const BatchPlan plan = plan_of(document_lengths(batch));
    const ForwardResult result =
        model.forward(batch.read("input_ids").flatten(), {.plan = &plan, .parallel = {}}, true);
    EXPECT_EQ(result.router_logits[0].scalar_type(), at::kBFloat16);
    EXPECT_EQ(result.expert_counts.sum().item<std::int64_t>(), 4 * 260 * 2);
    const CrossEntropy loss =
        cross_entropy_lm_head(result.hidden, model.head_weight(), batch.read("targets").flatten());
    loss.loss_sum.backward();
    for (const auto& [name, value] : model.parameters()) {
        EXPECT_EQ(value.grad().scalar_type(), at::kFloat) << name;
        EXPECT_TRUE(at::isfinite(value.grad()).all().item<bool>()) << name;
        EXPECT_GT(norm_of(value.grad()), 0.0) << name;
    }
}

TEST(Forward, WrongInputsAreRefused) {
    const HybridModel model = HybridModel::random(small_config(), 3, at::kFloat, at::kCPU);
    const BatchPlan plan = plan_of({3});
    const auto error = [&](const at::Tensor& ids) {
        return message_of<UsageError>(
            [&] { (void)model.forward(ids, {.plan = &plan, .parallel = {}}); });
    };
    EXPECT_TRUE(mentions(error(at::ones({2}, at::kLong)), "number of local token ids"));
    EXPECT_TRUE(mentions(error(at::ones({1, 3}, at::kLong)), "in one row"));
    EXPECT_TRUE(mentions(error(at::full({3}, 64, at::kLong)), "vocabulary of 64"));
    EXPECT_TRUE(mentions(error(at::full({3}, -1, at::kLong)), "vocabulary of 64"));
    EXPECT_TRUE(mentions(message_of<UsageError>([&] { (void)model.parameter("model.norm"); }),
                         "model.norm"));
}

TEST(Forward, TheFirstLayerThatIsNotFiniteIsFound) {
    const HybridModel model = HybridModel::random(small_config(), 3, at::kFloat, at::kCPU);
    model.parameter("model.layers.2.mlp.down_proj.weight").detach()[5][7] =
        std::numeric_limits<float>::infinity();
    const BatchPlan plan = plan_of({9});
    const ForwardResult result =
        model.forward(at::ones({9}, at::kLong), {.plan = &plan, .parallel = {}}, true);
    EXPECT_EQ(first_non_finite_layer(result), 2);
}

}  // namespace
}  // namespace hybridcp
