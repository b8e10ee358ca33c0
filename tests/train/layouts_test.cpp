// Whole models under every mode, layout and way to convert, on several numbers of ranks, against
// Hugging Face's numbers (golden/README.md section 8); what a step converts; and what the linear
// layers hold, which falls with the number of ranks.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>

#include "mesh_threads.h"
#include "model/layout_schedule.h"
#include "model/safetensors.h"
#include "ops/conversion.h"
#include "train/step.h"
#include "train/tensor_memory.h"

namespace hybridcp {
namespace {

using testing::run_mesh;

constexpr double kLossBar = 5e-6;
constexpr double kAllGradientsBar = 1e-4;
constexpr std::array kModes{LinearAttentionMode::kP2p, LinearAttentionMode::kAllGather,
                            LinearAttentionMode::kScan, LinearAttentionMode::kUlysses,
                            LinearAttentionMode::kGatherHidden};

std::string golden_model(const std::string& name) {
    return std::string(HCP_GOLDEN_DIR) + "/models/" + name;
}

HybridModel load_model(const std::string& name, double aux_loss_coef) {
    ModelConfig config = read_model_config(golden_model(name));
    config.router_aux_loss_coef = aux_loss_coef;
    return HybridModel(config, load_parameters(golden_model(name), config, at::kCPU), at::kFloat);
}

/// A packed case: documents of very different lengths, empty ones too.
struct PackedCase {
    std::string model;
    double aux_loss_coef = 0.0;  // as its manifest has it
    TokenBatch batch;
    SafetensorsFile expected;

    explicit PackedCase(const std::string& name)
        : model(name), expected(golden_model(name) + "/packed/expected.safetensors") {
        const SafetensorsFile file(golden_model(name) + "/packed/batch.safetensors");
        const at::Tensor offsets = file.read("cu_seqlens").to(at::kLong);
        for (std::int64_t doc = 0; doc + 1 < offsets.size(0); ++doc) {
            batch.document_lengths.push_back(
                (offsets[doc + 1] - offsets[doc]).item<std::int64_t>());
        }
        batch.token_ids = file.read("input_ids").reshape({-1}).to(at::kLong);
        batch.targets = file.read("targets").reshape({-1}).to(at::kLong);
        if (expected.contains("aux_loss")) {
            const auto number = [&](const char* key) {
                return expected.read(key).to(at::kDouble).item<double>();
            };
            aux_loss_coef = (number("loss") - number("ce_loss")) / number("aux_loss");
        }
    }
};

/// Distance of all gradients together from the recorded ones.
double gradient_error(const HybridModel& model, const SafetensorsFile& expected) {
    double difference = 0.0, norm = 0.0;
    for (const NamedParameter& parameter : model.parameters()) {
        const at::Tensor reference = expected.read("grad." + parameter.name).to(at::kDouble);
        difference += (parameter.value.grad().to(at::kDouble) - reference.view_as(parameter.value))
                          .square()
                          .sum()
                          .item<double>();
        norm += reference.square().sum().item<double>();
    }
    return std::sqrt(difference / norm);
}

std::vector<Parallel> all_ways(int num_ranks, const HeadCounts& heads) {
    std::vector<Parallel> ways;
    for (const LinearAttentionMode mode : kModes) {
        if (mode == LinearAttentionMode::kUlysses && heads.linear_value_heads % num_ranks != 0) {
            continue;
        }
        for (const LayoutKind stream :
             {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kFolded}) {
            for (const LayoutKind linear :
                 {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kFolded}) {
                const bool converts = linear != stream;
                if (converts &&
                    (linear == LayoutKind::kZigzag || mode == LinearAttentionMode::kGatherHidden)) {
                    continue;  // not a choice of a recipe
                }
                Parallel way{.cp = num_ranks,
                             .linear_attention_mode = mode,
                             .full_attention_mode = stream == LayoutKind::kFolded
                                                        ? FullAttentionMode::kAllGather
                                                        : FullAttentionMode::kRing,
                             .layout_kind = stream,
                             .layout_cut = LayoutCut::kDocument,
                             .linear_layout_kind = linear};
                ways.push_back(way);
                way.layout_cut = LayoutCut::kRow;
                way.elide_conversions = false;
                ways.push_back(way);
            }
        }
    }
    return ways;
}

std::string describe(const Parallel& way) {
    return fmt::format("mode {}, {} cut by {}, linear layers {}, elide {}",
                       static_cast<int>(way.linear_attention_mode), to_string(way.layout_kind),
                       to_string(way.layout_cut), to_string(way.linear_layout_kind),
                       way.elide_conversions);
}

class EveryWay : public ::testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(EveryWay, IsOneModel) {
    const PackedCase packed(std::get<0>(GetParam()));
    const double expected_loss = packed.expected.read("loss").to(at::kDouble).item<double>();
    run_mesh(1, std::get<1>(GetParam()), [&](const Mesh& mesh) {
        const HybridModel model = load_model(packed.model, packed.aux_loss_coef);
        for (const Parallel& way : all_ways(mesh.cp->size(), model.config().head_counts())) {
            SCOPED_TRACE(describe(way));
            mesh.reset_recorders();
            const StepLoss loss = forward_backward(model, {packed.batch}, way, mesh);
            EXPECT_NEAR(loss.loss, expected_loss, kLossBar);
            EXPECT_LE(gradient_error(model, packed.expected), kAllGradientsBar);
            // Forward and backward: an all-to-all is one message, a swap one where there is a
            // partner.
            const std::int64_t messages = mesh.traffic()["conversion"].messages;
            const std::int64_t converted = 2 * num_conversions(model.config(), way);
            EXPECT_LE(messages, converted);
            if (mesh.cp->size() == 4) {  // every rank has a partner in each pair of layouts
                EXPECT_EQ(messages, converted);
            }
        }
    });
}

INSTANTIATE_TEST_SUITE_P(Models,
                         EveryWay,
                         ::testing::Combine(::testing::Values("dense_tiny", "moe_tiny"),
                                            ::testing::Values(2, 3, 4)),
                         [](const auto& test) {
                             return std::string(std::get<0>(test.param)) + "_p" +
                                    std::to_string(std::get<1>(test.param));
                         });

TEST(Schedule, TwoConversionsABlockOfThreeAndOne) {
    const ModelConfig config = preset_model_config("qwen3_5-0.8b");
    Parallel way{
        .cp = 4, .layout_kind = LayoutKind::kZigzag, .linear_layout_kind = LayoutKind::kFolded};
    EXPECT_EQ(num_conversions(config, way), 2 * 6);
    EXPECT_EQ(describe_layouts(with_num_layers(config, 8), way),
              "layouts: z zigzag, f folded, | conversion: |fff|z|fff|z: 4 conversions of hidden a "
              "pass");
    EXPECT_EQ(num_conversions(with_num_layers(config, 2), way), 2);
    way.elide_conversions = false;
    EXPECT_EQ(num_conversions(config, way), 6 * 6);
    way.linear_layout_kind = LayoutKind::kZigzag;
    EXPECT_EQ(num_conversions(config, way), 0);
    EXPECT_EQ(describe_layouts(config, way), "");
    EXPECT_EQ(num_conversions(config, {.linear_layout_kind = LayoutKind::kFolded}), 0)
        << "one rank";
}

// What a linear layer holds between its forward and backward pass, byte by byte.
TEST(Memory, ActivationsOfLinearLayersFallWithTheRanks) {
    constexpr std::int64_t kTokens = 2048;
    const HybridModel model =
        HybridModel::random(preset_model_config("tiny"), 1, at::kFloat, at::kCPU);
    const auto held = [&](const Parallel& way) {
        std::int64_t most = 0;
        std::mutex mutex;
        run_mesh(1, way.cp, [&](const Mesh& mesh) {
            const BatchPlan plan = make_batch_plan(
                {.document_lengths = {kTokens}, .parallel = way, .rank = mesh.cp->rank()});
            const CpContext context{.group = mesh.cp.get(), .plan = &plan, .parallel = way};
            const LayoutTag layout = plan.to_linear ? plan.linear->tag : plan.tag;
            const Sharded x{at::randn({plan.num_local_tokens(), model.config().hidden_size})
                                .requires_grad_(true),
                            plan.tag};
            (void)model.mixer(convert(x, layout, context), 0, context);  // what is made once
            const TensorMemory memory;
            const Sharded y = model.mixer(convert(x, layout, context), 0, context);
            const std::lock_guard<std::mutex> lock(mutex);
            most = std::max(most, memory.live_bytes());
        });
        return static_cast<double>(most);
    };
    const double alone = held(Parallel{});
    for (const int num_ranks : {2, 4, 8}) {
        Parallel way{.cp = num_ranks,
                     .linear_attention_mode = LinearAttentionMode::kP2p,
                     .layout_kind = LayoutKind::kZigzag,
                     .linear_layout_kind = LayoutKind::kFolded};
        // Beside 1/P of the activations each rank keeps the start state, M and the halo of each
        // segment, and the converted x.
        const auto& config = model.config();
        const std::int64_t state_columns =
            config.linear_value_head_dim + config.linear_key_head_dim;
        const double of_segment =
            4.0 * static_cast<double>(config.linear_num_value_heads * config.linear_key_head_dim *
                                          state_columns +
                                      3 * config.conv_channels());
        const double part = 1.01 * alone / num_ranks;
        const auto x_bytes = 4.0 * static_cast<double>(kTokens / num_ranks * config.hidden_size);
        EXPECT_LE(held(way), part + of_segment + x_bytes) << "converted, " << num_ranks;
        way.linear_layout_kind = LayoutKind::kZigzag;
        EXPECT_LE(held(way), part + 2 * of_segment) << "native, " << num_ranks;
        way.linear_attention_mode = LinearAttentionMode::kGatherHidden;
        EXPECT_GE(held(way) * num_ranks / alone, 0.9 * num_ranks) << "the baseline holds all of it";
    }
}

}  // namespace
}  // namespace hybridcp
