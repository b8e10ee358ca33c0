// What activation checkpointing leaves in memory, counted byte by byte:
// docs/activation-checkpointing.md has the formulas.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>

#include "hybridcp/model.h"
#include "mesh_threads.h"
#include "ops/batch_plan.h"
#include "ops/context_parallel.h"
#include "train/tensor_memory.h"

namespace hybridcp {
namespace {

using testing::run_mesh;

struct Memory {
    std::int64_t held = 0;  // after the forward pass
    std::int64_t peak = 0;
};

constexpr std::int64_t kTokens = 1024;

ModelConfig make_config(std::int64_t num_layers) {
    ModelConfig config = with_num_layers(preset_model_config("qwen3_5-0.8b"), num_layers);
    config.hidden_size = 128;
    config.intermediate_size = 256;
    config.vocab_size = 64;
    config.linear_num_key_heads = 2;
    config.linear_num_value_heads = 4;
    config.linear_key_head_dim = config.linear_value_head_dim = 32;
    config.num_attention_heads = 4;
    config.num_key_value_heads = 2;
    config.head_dim = 32;
    return config;
}

/// A model whose gradients are there already.
HybridModel make_model(std::int64_t num_layers, ActivationCheckpoint checkpoint) {
    HybridModel model = HybridModel::random(make_config(num_layers), 1, at::kFloat, at::kCPU);
    model.activation_checkpoint = checkpoint;
    for (const NamedParameter& parameter : model.parameters()) {
        at::Tensor value = parameter.value;
        value.mutable_grad() = at::zeros_like(value);
    }
    return model;
}

/// The most bytes that a rank's forward and backward pass through all layers take.
Memory measure(std::int64_t num_layers, ActivationCheckpoint checkpoint, const Parallel& parallel) {
    Memory most;
    std::mutex mutex;
    run_mesh(1, parallel.cp, [&](const Mesh& mesh) {
        const HybridModel model = make_model(num_layers, checkpoint);
        const BatchPlan plan = make_batch_plan(
            {.document_lengths = {kTokens}, .parallel = parallel, .rank = mesh.cp->rank()});
        const CpContext context{.group = mesh.cp.get(), .plan = &plan, .parallel = parallel};
        const at::Tensor ids = plan.flat_indices % 64;
        {
            const at::NoGradGuard no_grad;
            (void)model.forward(ids, context);  // what is made once
        }
        const TensorMemory memory;
        const at::Tensor hidden = model.forward(ids, context).hidden;
        const std::int64_t held = memory.live_bytes();
        hidden.backward(at::ones_like(hidden));
        const std::lock_guard<std::mutex> lock(mutex);
        most.held = std::max(most.held, held);
        most.peak = std::max(most.peak, memory.peak_bytes());
    });
    return most;
}

TEST(Memory, FullHoldsLessThanSelectiveThanNone) {
    for (const int num_ranks : {1, 2}) {
        const Parallel parallel{.cp = num_ranks,
                                .linear_attention_mode = LinearAttentionMode::kP2p,
                                .full_attention_mode = FullAttentionMode::kRing,
                                .linear_attention_backend = LinearAttentionBackend::kFused};
        const Memory none = measure(8, ActivationCheckpoint::kNone, parallel);
        const Memory selective = measure(8, ActivationCheckpoint::kSelective, parallel);
        const Memory full = measure(8, ActivationCheckpoint::kFull, parallel);
        EXPECT_LT(selective.peak, 0.85 * static_cast<double>(none.peak));
        EXPECT_LT(full.peak, 0.5 * static_cast<double>(selective.peak));
        EXPECT_LT(full.held, 0.4 * static_cast<double>(selective.held));
    }
}

// docs/activation-checkpointing.md: what a layer keeps under `full`, counted in bytes.
TEST(Memory, ALayerUnderFullKeepsItsInputAndWhatItReceived) {
    constexpr std::int64_t kStream = 128 * 4;                 // bytes a token: d fp32
    constexpr std::int64_t kOutput = 4 * 32 * 4;              // Hq D
    constexpr std::int64_t kState = 4 * 32 * 32 * 4;          // Hv K V fp32; M has as many
    constexpr std::int64_t kHalo = 3 * (2 * 2 + 4) * 32 * 4;  // (W-1) C
    const auto growth = [&](const Parallel& parallel) {
        const auto held = [&](std::int64_t layers) {
            return measure(layers, ActivationCheckpoint::kFull, parallel).held;
        };
        return held(8) - held(4);  // three linear layers and one of full attention
    };
    Parallel parallel{.cp = 1,
                      .linear_attention_mode = LinearAttentionMode::kP2p,
                      .full_attention_mode = FullAttentionMode::kRing,
                      .linear_attention_backend = LinearAttentionBackend::kFused};
    EXPECT_EQ(growth(parallel), kTokens * (4 * kStream + kOutput));
    const std::int64_t lse = 4 * 4;
    for (const int num_ranks : {2, 4}) {
        parallel.cp = num_ranks;
        EXPECT_EQ(growth(parallel),
                  kTokens / num_ranks * (4 * kStream + kOutput + lse) + 3 * (kHalo + 2 * kState))
            << num_ranks << " ranks";
    }
}

}  // namespace
}  // namespace hybridcp
