// What crosses a segment's boundary: heads that forget their start (nothing of theirs is computed,
// sent or waited for, and no bit changes), and documents that go on from an earlier call, against
// the fp64 recurrence.

#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <limits>
#include <mutex>

#include "kernels/conv/causal_conv.h"
#include "ops/gdn_cases.h"
#include "rank_threads.h"

namespace hybridcp::testing {
namespace {

constexpr std::array kStateModes{LinearAttentionMode::kP2p, LinearAttentionMode::kAllGather,
                                 LinearAttentionMode::kScan};
constexpr double kNoFloor = -std::numeric_limits<double>::infinity();
constexpr std::int64_t kChunk = 16;

Op gdn_with_floor(double floor) {
    return [floor](const std::vector<at::Tensor>& x, const CpContext& context) {
        return gated_delta_rule_cp(as_gdn_shards(x, context),
                                   GdnOptions{.chunk_size = kChunk, .summary_floor = floor},
                                   context)
            .o.local;
    };
}

/// Head 0 never decays, 1 reaches -60 within a segment, 2 forgets within a chunk, 3 within three.
OpInputs mixed_decay(std::int64_t T) {
    OpInputs inputs = gdn_inputs(T, {2, 4});
    inputs.tokens[3].select(1, 0).zero_();
    inputs.tokens[3].select(1, 1).fill_(-1.0);
    inputs.tokens[3].select(1, 2).fill_(-20.0);
    inputs.tokens[3].select(1, 3).fill_(-2.5);
    return inputs;
}

class Forgetting : public ::testing::TestWithParam<int> {
  protected:
    void SetUp() override {
        at::set_num_threads(1);
        at::manual_seed(21);
    }

    /// Exact summaries against none cut, to the rounding of a product.
    static void expect_eager_agrees(const Layout& layout,
                                    LinearAttentionMode mode,
                                    const OpInputs& inputs) {
        const Parallel parallel{.linear_attention_mode = mode};
        const ShardedRun whole = run_sharded(layout, parallel, inputs, gdn_with_floor(kNoFloor));
        const ShardedRun cut =
            run_sharded(layout, parallel, inputs, gdn_with_floor(GdnOptions::kExactSummary));
        const auto expect_near = [](const at::Tensor& x, const at::Tensor& reference) {
            EXPECT_LE((x - reference).norm().item<double>(),
                      1e-6 * reference.norm().item<double>());
        };
        expect_near(cut.output, whole.output);
        for (std::size_t i = 0; i < whole.gradients.size(); ++i) {
            expect_near(cut.gradients[i], whole.gradients[i]);
        }
    }
};

TEST_P(Forgetting, ExactSummariesChangeNoBit) {
    const OpInputs inputs = mixed_decay(480);
    for (const LayoutKind kind : kLayoutKinds) {
        const Layout layout = Layout::make(
            {.kind = kind, .num_ranks = GetParam(), .document_lengths = {300, 0, 90, 90}});
        for (const LinearAttentionMode mode : kStateModes) {
            // In fused kernels a head's bits do not depend on what else is computed. ATen's batched
            // products promise that on some CPUs only, so that eager cannot be compared so.
            const Parallel parallel{.linear_attention_mode = mode,
                                    .linear_attention_backend = LinearAttentionBackend::kFused};
            const ShardedRun whole =
                run_sharded(layout, parallel, inputs, gdn_with_floor(kNoFloor));
            const ShardedRun cut =
                run_sharded(layout, parallel, inputs, gdn_with_floor(GdnOptions::kExactSummary));
            EXPECT_TRUE(at::equal(cut.output, whole.output));
            // The comparison would see a summary that leaves out too much.
            const ShardedRun short_walk =
                run_sharded(layout, parallel, inputs, gdn_with_floor(-0.5));
            EXPECT_FALSE(at::equal(short_walk.output, whole.output));
            for (std::size_t i = 0; i < whole.gradients.size(); ++i) {
                EXPECT_TRUE(at::equal(cut.gradients[i], whole.gradients[i])) << "gradient " << i;
            }
            expect_eager_agrees(layout, mode, inputs);
        }
    }
}

TEST_P(Forgetting, FastSummariesStayWithinTheBars) {
    const OpInputs inputs = mixed_decay(480);
    const Expected expected = gdn_recurrence(inputs, {0, 300, 300, 390, 480});
    for (const LayoutKind kind : kLayoutKinds) {
        const Layout layout = Layout::make(
            {.kind = kind, .num_ranks = GetParam(), .document_lengths = {300, 0, 90, 90}});
        for (const LinearAttentionMode mode : kStateModes) {
            expect_gdn(run_sharded(layout, Parallel{.linear_attention_mode = mode}, inputs,
                                   gdn_with_floor(GdnOptions::kFastSummary)),
                       expected);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Forgetting, ::testing::Values(2, 3, 4, 5, 8));

TEST(Forgetting, MOfSuchHeadsIsNotSent) {
    at::manual_seed(22);
    const OpInputs inputs = mixed_decay(480);
    const Layout layout = Layout::make({.num_ranks = 4, .document_lengths = {480}});
    const ShardedRun run =
        run_sharded(layout, Parallel{.linear_attention_mode = LinearAttentionMode::kAllGather},
                    inputs, gdn_with_floor(GdnOptions::kExactSummary));
    // 120 tokens a rank: heads 2 and 3 (and 1: -120) forget, head 0 does not.
    const std::int64_t S = 4 * 8 * 6, M = 1 * 8 * 8;
    for (const Recorder& recorder : run.traffic) {
        EXPECT_EQ(recorder.of("gdn_summary").bytes, 3 * (S + M) * 4);
        EXPECT_EQ(recorder.of("gdn_independent").bytes, 3 * 4);
    }
}

// Rank 1 forgets its start, so rank 2 gets its state although rank 0 has not even begun.
TEST(Forgetting, StateLeavesWithoutWaitingForItsPredecessor) {
    at::manual_seed(23);
    OpInputs inputs = gdn_inputs(96, {2, 4});
    inputs.tokens[3].fill_(-20.0);
    const Layout layout = Layout::make({.num_ranks = 3, .document_lengths = {96}});
    std::promise<void> last_is_done;
    std::future<void> done = last_is_done.get_future();
    run_ranks(3, [&](Group& group) {
        const BatchPlan plan = make_batch_plan(layout, group.rank(), kConvWidth, at::kCPU);
        const CpContext context{.group = &group,
                                .plan = &plan,
                                .parallel = {.linear_attention_mode = LinearAttentionMode::kP2p}};
        std::vector<at::Tensor> local;
        for (const at::Tensor& tensor : inputs.tokens) {
            local.push_back(tensor.index_select(0, plan.flat_indices));
        }
        if (group.rank() == 0) {
            EXPECT_EQ(done.wait_for(std::chrono::seconds(20)), std::future_status::ready)
                << "rank 2 waits for rank 0";
        }
        (void)gdn_with_floor(GdnOptions::kExactSummary)(local, context);
        if (group.rank() == 2) {
            last_is_done.set_value();
        }
    });
}

/// Sums over ranks of what a stateful call gives, token tensors in flat order.
struct StatefulRun {
    at::Tensor o, final_states;
    std::vector<at::Tensor> gradients;  // of q, k, v, g, beta, then of the initial states
};

struct StatefulCase {
    std::vector<std::int64_t> documents;
    at::Tensor initial, d_final;  // [N, Hv, K, V]
};

StatefulRun run_stateful(const Layout& layout,
                         const Parallel& parallel,
                         const OpInputs& inputs,
                         const StatefulCase& stateful) {
    StatefulRun run{.o = at::zeros_like(inputs.d_output),
                    .final_states = at::zeros_like(stateful.initial),
                    .gradients = {}};
    for (const at::Tensor& tensor : inputs.tokens) {
        run.gradients.push_back(at::zeros_like(tensor));
    }
    run.gradients.push_back(at::zeros_like(stateful.initial));
    std::mutex mutex;
    run_ranks(layout.num_ranks(), [&](Group& group) {
        const BatchPlan plan = make_batch_plan(layout, group.rank(), kConvWidth, at::kCPU);
        const CpContext context{.group = &group, .plan = &plan, .parallel = parallel};
        std::vector<at::Tensor> leaves;
        for (const at::Tensor& tensor : inputs.tokens) {
            leaves.push_back(tensor.index_select(0, plan.flat_indices).requires_grad_(true));
        }
        const at::Tensor initial = stateful.initial.clone().requires_grad_(true);
        const GdnResult result =
            gated_delta_rule_cp(as_gdn_shards(leaves, context), GdnOptions{.chunk_size = kChunk},
                                context, {.initial = initial, .want_final = true});
        ((result.o.local * inputs.d_output.index_select(0, plan.flat_indices)).sum() +
         (result.states * stateful.d_final).sum())
            .backward();
        leaves.push_back(initial);
        const std::lock_guard<std::mutex> lock(mutex);
        run.o.index_copy_(0, plan.flat_indices, result.o.local.detach());
        run.final_states += result.states.detach();
        for (std::size_t i = 0; i < leaves.size(); ++i) {
            if (i + 1 < leaves.size()) {
                run.gradients[i].index_copy_(0, plan.flat_indices, leaves[i].grad());
            } else if (leaves[i].grad().defined()) {
                run.gradients[i] += leaves[i].grad();
            }
        }
    });
    return run;
}

class GoingOn : public ::testing::TestWithParam<int> {};

TEST_P(GoingOn, FromInitialStatesToFinalOnesAsTheRecurrence) {
    at::set_num_threads(1);
    at::manual_seed(24);
    const std::vector<std::int64_t> documents{70, 0, 1, 2, 90, 0};
    const std::vector<std::int64_t> offsets{0, 70, 70, 71, 73, 163, 163};
    OpInputs inputs = gdn_inputs(163, {2, 4});
    inputs.tokens[3].select(1, 2).fill_(-20.0);
    const StatefulCase stateful{documents, random({6, 4, 8, 6}), random({6, 4, 8, 6})};
    const auto reference = make_gdn_call(GdnBackend::kReference, as_gdn(to_double(inputs.tokens)),
                                         offsets, GdnOptions{});
    const GdnOutput output = reference->forward(stateful.initial.to(at::kDouble));
    const GdnGradients d =
        reference->backward(inputs.d_output.to(at::kDouble), stateful.d_final.to(at::kDouble));
    const std::vector<at::Tensor> gradients{d.dq, d.dk, d.dv, d.dg, d.dbeta, d.dS_start};
    for (const LayoutKind kind : kLayoutKinds) {
        for (const LayoutCut cut : {LayoutCut::kDocument, LayoutCut::kRow}) {
            const Layout layout = Layout::make(
                {.kind = kind, .cut = cut, .num_ranks = GetParam(), .document_lengths = documents});
            for (const LinearAttentionMode mode :
                 {LinearAttentionMode::kP2p, LinearAttentionMode::kAllGather,
                  LinearAttentionMode::kScan, LinearAttentionMode::kUlysses}) {
                if (mode == LinearAttentionMode::kUlysses && 4 % GetParam() != 0) {
                    continue;
                }
                SCOPED_TRACE(fmt::format("{} {} mode {}", to_string(kind), to_string(cut),
                                         static_cast<int>(mode)));
                const StatefulRun run =
                    run_stateful(layout, Parallel{.linear_attention_mode = mode}, inputs, stateful);
                EXPECT_LE(worst_head_error(run.o, output.o), kGdnBar);
                EXPECT_LE(worst_head_error(run.final_states, output.S_end), kGdnBar);
                for (std::size_t i = 0; i < gradients.size(); ++i) {
                    EXPECT_LE(worst_head_error(run.gradients[i], gradients[i]), kGdnBar)
                        << "gradient " << i;
                }
            }
        }
    }
}

// A convolution over two calls is one over the documents put together.
TEST_P(GoingOn, ConvolutionOverTwoCalls) {
    at::set_num_threads(1);
    at::manual_seed(25);
    const std::vector<std::int64_t> first{5, 0, 1, 2, 40}, second{3, 4, 0, 1, 33};
    constexpr std::int64_t kChannels = 3;
    const at::Tensor x1 = random({48, kChannels}), x2 = random({41, kChannels});
    const at::Tensor weight = random({kChannels, kConvWidth});
    std::vector<at::Tensor> pieces;
    std::vector<std::int64_t> offsets{0};
    std::int64_t at1 = 0, at2 = 0;
    for (std::size_t i = 0; i < first.size(); ++i) {
        pieces.push_back(x1.narrow(0, at1, first[i]));
        pieces.push_back(x2.narrow(0, at2, second[i]));
        at1 += first[i];
        at2 += second[i];
        offsets.push_back(offsets.back() + first[i] + second[i]);
    }
    const at::Tensor whole = causal_conv_silu(at::cat(pieces), weight, at::Tensor(), offsets);
    for (const LayoutKind kind : kLayoutKinds) {
        at::Tensor y = at::zeros_like(x2);
        std::mutex mutex;
        run_ranks(GetParam(), [&](Group& group) {
            const auto plan_of = [&](const std::vector<std::int64_t>& documents) {
                return make_batch_plan(
                    Layout::make(
                        {.kind = kind, .num_ranks = group.size(), .document_lengths = documents}),
                    group.rank(), kConvWidth, at::kCPU);
            };
            const BatchPlan plan1 = plan_of(first), plan2 = plan_of(second);
            const CpContext context1{.group = &group, .plan = &plan1, .parallel = {}};
            const CpContext context2{.group = &group, .plan = &plan2, .parallel = {}};
            at::Tensor rows =
                conv_final_rows(shard(x1.index_select(0, plan1.flat_indices), context1), context1);
            group.all_reduce_sum("conv_rows", rows);
            const at::Tensor local =
                causal_conv_silu_cp(shard(x2.index_select(0, plan2.flat_indices), context2), weight,
                                    context2, rows)
                    .local;
            const std::lock_guard<std::mutex> lock(mutex);
            y.index_copy_(0, plan2.flat_indices, local);
        });
        std::int64_t at = 0;
        for (std::size_t i = 0; i < second.size(); ++i) {
            EXPECT_TRUE(at::allclose(y.narrow(0, at, second[i]),
                                     whole.narrow(0, offsets[i] + first[i], second[i]), 1e-6,
                                     1e-6));
            at += second[i];
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, GoingOn, ::testing::Values(1, 2, 3, 4, 5, 8));

}  // namespace
}  // namespace hybridcp::testing
