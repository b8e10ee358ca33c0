// Conversions between layouts: every token arrives where the plan says, there and back changes no
// bit of values or gradients, every op refuses a tensor in another layout, and a layer makes the
// host wait for nothing.

#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "ops/conversion.h"
#include "ops/gdn_cases.h"
#include "ops/token_gather.h"
#include "rank_threads.h"

namespace hybridcp::testing {
namespace {

struct Pair {
    LayoutKind stream;
    LayoutKind linear;
    LayoutCut cut;
};

std::vector<Pair> layout_pairs() {
    std::vector<Pair> pairs;
    for (const LayoutCut cut : {LayoutCut::kDocument, LayoutCut::kRow}) {
        for (const LayoutKind stream : kLayoutKinds) {
            for (const LayoutKind linear : kLayoutKinds) {
                if (stream != linear) {
                    pairs.push_back({stream, linear, cut});
                }
            }
        }
    }
    return pairs;
}

BatchPlanOptions plan_options(const std::vector<std::int64_t>& documents,
                              const Pair& pair,
                              const Group& group) {
    return {.document_lengths = documents,
            .parallel = {.cp = group.size(),
                         .layout_kind = pair.stream,
                         .layout_cut = pair.cut,
                         .linear_layout_kind = pair.linear},
            .rank = group.rank(),
            .conv_width = kConvWidth};
}

void expect_round_trip(const CpContext& context, at::ScalarType dtype) {
    const BatchPlan& plan = *context.plan;
    const LayoutTag linear_tag = plan.linear->tag;
    const at::Tensor x =
        plan.flat_indices.to(dtype).unsqueeze(1).repeat({1, 3}).requires_grad_(true);
    const Sharded there = convert({x, plan.tag}, linear_tag, context);
    EXPECT_TRUE(at::equal(there.local.select(1, 2).detach(), plan.linear->flat_indices.to(dtype)));
    EXPECT_EQ(there.layout, linear_tag);
    const Sharded back = convert(there, plan.tag, context);
    EXPECT_TRUE(at::equal(back.local, x));
    at::manual_seed(17);
    const at::Tensor d = at::randn(x.sizes()).to(dtype);
    back.local.backward(d);
    EXPECT_TRUE(at::equal(x.grad(), d));
}

TEST(Conversion, ThereAndBackIsTheIdentityOnEveryPairOfLayouts) {
    const std::vector<std::vector<std::int64_t>> lists{
        {64}, {63, 1}, {5, 0, 100, 1, 1, 130, 20, 0}, {2}, {0, 3, 2}, {1, 1, 1, 1, 1, 1, 1}};
    for (const int num_ranks : {2, 3, 4, 5, 8}) {
        run_ranks(num_ranks, [&](Group& group) {
            for (const Pair& pair : layout_pairs()) {
                for (const auto& documents : lists) {
                    const BatchPlanOptions options = plan_options(documents, pair, group);
                    const BatchPlan plan = make_batch_plan(options);
                    const CpContext context{
                        .group = &group, .plan = &plan, .parallel = options.parallel};
                    expect_round_trip(context, at::kFloat);
                    expect_round_trip(context, at::kDouble);
                }
            }
        });
    }
}

template <typename Call>
void expect_refused(const char* op, const Call& call) {
    try {
        call();
        ADD_FAILURE() << op << " took a tensor in another layout";
    } catch (const UsageError& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find("folded, cut by document"), std::string::npos) << text;
        EXPECT_NE(text.find("zigzag, cut by document"), std::string::npos) << text;
    }
}

TEST(WrongLayout, IsRefusedByEveryOp) {
    const std::int64_t T = 32;
    run_ranks(2, [&](Group& group) {
        const BatchPlan plan = make_batch_plan(plan_options(
            {T}, {LayoutKind::kZigzag, LayoutKind::kZigzag, LayoutCut::kDocument}, group));
        const LayoutTag folded =
            Layout::make({.kind = LayoutKind::kFolded, .num_ranks = 2, .document_lengths = {T}})
                .tag();
        const CpContext context{.group = &group, .plan = &plan, .parallel = {.cp = 2}};
        const std::int64_t n = plan.num_local_tokens();
        const Sharded good{random({n, 2, 4}), plan.tag};
        const Sharded wrong{good.local, folded};
        const Sharded gate{-at::rand({n, 2}), plan.tag};
        const at::Tensor weight = random({2, kConvWidth});
        const Sharded rows{random({n, 2}), folded};
        expect_refused("conv", [&] { (void)causal_conv_silu_cp(rows, weight, context); });
        expect_refused("conv rows", [&] { (void)conv_final_rows(rows, context); });
        for (int i = 0; i < 3; ++i) {
            expect_refused("attention", [&] {
                (void)causal_attention_cp(i == 0 ? wrong : good, i == 1 ? wrong : good,
                                          i == 2 ? wrong : good, 1.0, context);
            });
        }
        for (int i = 0; i < 5; ++i) {
            const Sharded wrong_gate{gate.local, folded};
            const GdnShards inputs{.q = i == 0 ? wrong : good,
                                   .k = i == 1 ? wrong : good,
                                   .v = i == 2 ? wrong : good,
                                   .g = i == 3 ? wrong_gate : gate,
                                   .beta = i == 4 ? wrong_gate : gate};
            expect_refused("gdn", [&] { (void)gated_delta_rule_cp(inputs, {}, context); });
        }
        expect_refused("gather", [&] { (void)gather_tokens(wrong, {.op = "gather"}, context); });
        expect_refused("convert", [&] { (void)convert(wrong, plan.tag, context); });
    });
}

TEST(WrongLayout, OfOtherDocumentsIsRefusedToo) {
    const Layout batch = Layout::make({.num_ranks = 1, .document_lengths = {4, 4}});
    const Layout other = Layout::make({.num_ranks = 1, .document_lengths = {8}});
    const BatchPlan plan = make_batch_plan(batch, 0, kConvWidth, at::kCPU);
    const CpContext context{.plan = &plan, .parallel = {}};
    EXPECT_THROW(
        (void)causal_conv_silu_cp({random({8, 2}), other.tag()}, random({2, kConvWidth}), context),
        UsageError);
}

/// Operators that on a device make the host wait.
std::atomic<int> num_waits{0};

std::unique_ptr<at::ObserverContext> count_waits(const at::RecordFunction& function) {
    static const std::set<std::string> waiting{
        "aten::_local_scalar_dense", "aten::item",  "aten::nonzero",  "aten::masked_select",
        "aten::is_nonzero",          "aten::equal", "aten::_unique2", "aten::repeat_interleave"};
    if (waiting.count(function.name()) != 0) {
        ++num_waits;
    }
    return nullptr;
}

void run_layer(const CpContext& context) {
    const std::int64_t n = context.plan->num_local_tokens();
    const auto leaf = [&](std::vector<std::int64_t> shape) {
        return Sharded{random(shape).requires_grad_(true), context.plan->tag};
    };
    const Sharded x = convert(leaf({n, 6}), context.plan->linear->tag, context);
    const CpContext linear = linear_attention_context(context);
    const Sharded y = causal_conv_silu_cp(x, random({6, kConvWidth}), linear);
    const std::int64_t m = y.local.size(0);
    const Sharded heads = y.with(y.local.view({m, 2, 3}).repeat({1, 2, 1}));
    const Sharded gate = y.with(-at::rand({m, 4}));
    const Sharded o =
        gated_delta_rule_cp({.q = heads, .k = heads, .v = heads, .g = gate, .beta = gate},
                            GdnOptions{.chunk_size = 16}, linear)
            .o;
    const Sharded back = convert(o, context.plan->tag, context);
    const Sharded result = causal_attention_cp(back, back, back, 0.5, context);
    result.local.sum().backward();
}

TEST(HostWaits, NoLayerHasAny) {
    const auto handle = at::addGlobalCallback(
        at::RecordFunctionCallback(&count_waits).scopes({at::RecordScope::FUNCTION}));
    (void)at::ones({1}).item<float>();
    EXPECT_GE(num_waits.exchange(0), 1) << "the counter does not count";
    for (const LinearAttentionMode mode :
         {LinearAttentionMode::kP2p, LinearAttentionMode::kAllGather, LinearAttentionMode::kScan,
          LinearAttentionMode::kUlysses}) {
        for (const FullAttentionMode full :
             {FullAttentionMode::kUlysses, FullAttentionMode::kAllGather,
              FullAttentionMode::kRing}) {
            run_ranks(4, [&](Group& group) {
                BatchPlanOptions options = plan_options(
                    {40, 3, 57}, {LayoutKind::kZigzag, LayoutKind::kFolded, LayoutCut::kDocument},
                    group);
                options.parallel.linear_attention_mode = mode;
                options.parallel.full_attention_mode = full;
                const BatchPlan plan = make_batch_plan(options);
                run_layer({.group = &group, .plan = &plan, .parallel = options.parallel});
            });
            EXPECT_EQ(num_waits.exchange(0), 0)
                << "modes " << static_cast<int>(mode) << ", " << static_cast<int>(full);
        }
    }
    at::removeCallback(handle);
}

}  // namespace
}  // namespace hybridcp::testing
