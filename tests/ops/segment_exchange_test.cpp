// Ops in a segment give the bits of ops outside, kept or recomputed; a recomputed op sends nothing
// again, but for ulysses.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "kernels/attention/attention.h"
#include "ops/gathered_attention.h"
#include "ops/gdn_cases.h"
#include "ops/segment.h"
#include "ops/token_gather.h"

namespace hybridcp::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

/// The op as a segment on `inputs` of its own.
Op in_segment(const Op& op, bool recompute) {
    return [op, recompute](const Tensors& x, const CpContext& context) {
        const SegmentHooks hooks{.before_backward = [] {}};
        return run_segment(x,
                           [op, context](const Tensors& inputs, ExchangeTape* tape) {
                               CpContext taped = context;
                               taped.tape = tape;
                               return Tensors{op(inputs, taped)};
                           },
                           {.recompute = recompute, .hooks = hooks})[0];
    };
}

void expect_same_bits(const ShardedRun& a, const ShardedRun& b) {
    EXPECT_TRUE(at::equal(a.output, b.output));
    for (std::size_t i = 0; i < a.gradients.size(); ++i) {
        EXPECT_TRUE(at::equal(a.gradients[i], b.gradients[i])) << "gradient " << i;
    }
}

/// Traffic of `again` against `once`; `repeated`: the op that sends its forward part again, which
/// is half of it.
void expect_traffic(const ShardedRun& again, const ShardedRun& once, const std::string& repeated) {
    for (std::size_t rank = 0; rank < once.traffic.size(); ++rank) {
        ASSERT_EQ(again.traffic[rank].traffic().size(), once.traffic[rank].traffic().size());
        for (const auto& [op, traffic] : once.traffic[rank].traffic()) {
            const OpTraffic recomputed = again.traffic[rank].of(op);
            const std::int64_t more = op == repeated ? traffic.messages / 2 : 0;
            EXPECT_EQ(recomputed.messages, traffic.messages + more) << op << " of rank " << rank;
            if (more == 0) {
                EXPECT_EQ(recomputed.bytes, traffic.bytes) << op << " of rank " << rank;
            }
        }
    }
}

struct OpCase {
    std::string name;
    Parallel parallel;
    Op op;
    OpInputs inputs;
    std::string repeated = {};
};

Tensors in_dtype(const Tensors& tensors, at::ScalarType dtype) {
    Tensors result;
    for (const at::Tensor& tensor : tensors) {
        result.push_back(tensor.to(dtype));
    }
    return result;
}

constexpr at::ScalarType kTwoDtypes[] = {at::kFloat, at::kBFloat16};

std::vector<OpCase> gdn_cases(std::int64_t T, int num_ranks) {
    std::vector<OpCase> cases;
    for (const LinearAttentionMode mode :
         {LinearAttentionMode::kP2p, LinearAttentionMode::kAllGather, LinearAttentionMode::kScan,
          LinearAttentionMode::kUlysses}) {
        for (const LinearAttentionBackend backend :
             {LinearAttentionBackend::kEager, LinearAttentionBackend::kFused}) {
            const bool ulysses = mode == LinearAttentionMode::kUlysses;
            if (ulysses && 4 % num_ranks != 0) {
                continue;
            }
            OpInputs inputs = gdn_inputs(T, {.key_heads = 2, .value_heads = 4});
            if (backend == LinearAttentionBackend::kFused) {
                for (const std::size_t i : {0, 1, 2}) {
                    inputs.tokens[i] = inputs.tokens[i].to(at::kBFloat16);
                }
                inputs.d_output = inputs.d_output.to(at::kBFloat16);
            }
            cases.push_back(
                {.name = fmt::format("gdn mode {} backend {}", static_cast<int>(mode),
                                     static_cast<int>(backend)),
                 .parallel = {.linear_attention_mode = mode, .linear_attention_backend = backend},
                 .op = gdn_op,
                 .inputs = inputs,
                 .repeated = ulysses ? "gdn_ulysses" : ""});
        }
    }
    return cases;
}

std::vector<OpCase> attention_cases(std::int64_t T, int num_ranks) {
    std::vector<OpCase> cases;
    const Tensors tokens{random({T, 4, 8}), random({T, 2, 8}), random({T, 2, 8})};
    const at::Tensor d_output = random({T, 4, 8});
    for (const FullAttentionMode mode :
         {FullAttentionMode::kUlysses, FullAttentionMode::kAllGather, FullAttentionMode::kRing}) {
        const bool ulysses = mode == FullAttentionMode::kUlysses;
        if (ulysses && 4 % num_ranks != 0) {
            continue;
        }
        for (const at::ScalarType dtype : kTwoDtypes) {
            cases.push_back({.name = fmt::format("attention mode {} {}", static_cast<int>(mode),
                                                 at::toString(dtype)),
                             .parallel = {.full_attention_mode = mode},
                             .op =
                                 [](const Tensors& x, const CpContext& context) {
                                     return causal_attention_cp(shard(x[0], context),
                                                                shard(x[1], context),
                                                                shard(x[2], context), 0.3, context)
                                         .local;
                                 },
                             .inputs = {.tokens = in_dtype(tokens, dtype),
                                        .weights = {},
                                        .d_output = d_output.to(dtype)},
                             .repeated = ulysses ? "attention_ulysses" : ""});
        }
    }
    return cases;
}

OpCase conv_case(std::int64_t T) {
    return {.name = "conv",
            .parallel = {},
            .op =
                [](const Tensors& x, const CpContext& context) {
                    return causal_conv_silu_cp(shard(x[0], context), x[1], context).local;
                },
            .inputs = {.tokens = {random({T, 6})},
                       .weights = {random({6, kConvWidth})},
                       .d_output = random({T, 6})}};
}

class EveryRankCount : public ::testing::TestWithParam<int> {};

TEST_P(EveryRankCount, OpsInSegmentsGiveTheSameBitsAndExchangeOnce) {
    at::set_num_threads(1);
    at::manual_seed(11);
    const int P = GetParam();
    for (const LayoutKind kind : kLayoutKinds) {
        const LayoutCase layout{.name = "", .document_lengths = {5, 0, 71, 1, 40, 2}, .kind = kind};
        std::vector<OpCase> cases = gdn_cases(119, P);
        for (OpCase& attention : attention_cases(119, P)) {
            cases.push_back(std::move(attention));
        }
        cases.push_back(conv_case(119));
        for (const OpCase& c : cases) {
            SCOPED_TRACE(fmt::format("{}, {}", c.name, to_string(kind)));
            const Layout cut = make_layout(layout, P);
            const ShardedRun plain = run_sharded(cut, c.parallel, c.inputs, c.op);
            const ShardedRun again =
                run_sharded(cut, c.parallel, c.inputs, in_segment(c.op, /*recompute=*/true));
            expect_same_bits(again, plain);
            expect_traffic(again, plain, c.repeated);
            if (kind == LayoutKind::kZigzag) {
                const ShardedRun kept =
                    run_sharded(cut, c.parallel, c.inputs, in_segment(c.op, /*recompute=*/false));
                expect_same_bits(kept, plain);
                expect_traffic(kept, plain, "");
            }
        }
    }
}

// What the function replaced: autograd through the gathered keys.
TEST_P(EveryRankCount, GatheredAttentionIsAttentionToGatheredKeys) {
    at::set_num_threads(1);
    at::manual_seed(12);
    const int P = GetParam();
    if (P == 1) {
        return;
    }
    const LayoutCase layout{.name = "", .document_lengths = {50, 0, 1, 69}};
    for (const at::ScalarType dtype : kTwoDtypes) {
        const OpInputs inputs{
            .tokens =
                in_dtype({random({120, 4, 8}), random({120, 2, 8}), random({120, 2, 8})}, dtype),
            .weights = {},
            .d_output = random({120, 4, 8}).to(dtype)};
        const Op plain = [](const Tensors& x, const CpContext& context) {
            const at::Tensor kv =
                gather_tokens(shard(at::cat({x[1], x[2]}, 2), context),
                              {.op = "attention_kv", .dtype = at::kFloat}, context);
            return causal_attention(x[0].to(at::kFloat), kv.narrow(2, 0, 8), kv.narrow(2, 8, 8),
                                    context.plan->local_blocks, 0.3)
                .o.to(x[0].scalar_type());
        };
        const Op gathered = [](const Tensors& x, const CpContext& context) {
            return gathered_attention(x[0], x[1], x[2], 0.3, context);
        };
        const Layout cut = make_layout(layout, P);
        expect_same_bits(run_sharded(cut, {}, inputs, gathered),
                         run_sharded(cut, {}, inputs, plain));
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, EveryRankCount, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace hybridcp::testing
