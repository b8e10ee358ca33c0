// Segments give the bits of the same code without them, kept or recomputed; a recomputed op sends
// nothing again, but for ulysses and gather_hidden; and nothing stays behind after backward.
#include "ops/segment.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "hybridcp/error.h"
#include "kernels/attention/attention.h"
#include "ops/gathered_attention.h"
#include "ops/gdn_cases.h"
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

/// y = tanh(x w), n = an integer, nothing, z = x + w; w is a parameter.
struct Toy {
    at::Tensor w = at::randn({3, 3}).set_requires_grad(true);
    int num_runs = 0;

    Tensors operator()(const Tensors& inputs) {
        ++num_runs;
        const at::Tensor& x = inputs[0];
        return {at::tanh(at::mm(x, w)), at::argmax(x), at::Tensor(), x + w};
    }
    SegmentFunction function() {
        return [this](const Tensors& inputs, ExchangeTape*) { return (*this)(inputs); };
    }
};

TEST(Segment, SeveralOutputsOfWhichSomeHaveNoGradient) {
    for (const bool recompute : {false, true}) {
        Toy toy;
        const at::Tensor x = at::randn({3, 3}).set_requires_grad(true);
        const Tensors plain = toy({x});
        (plain[0].sum() + (plain[3] * plain[3]).sum()).backward();
        const at::Tensor dx = x.grad().clone(), dw = toy.w.grad().clone();
        x.mutable_grad().reset();
        toy.w.mutable_grad().reset();
        toy.num_runs = 0;
        const Tensors outputs = run_segment(
            {x}, toy.function(), {.recompute = recompute, .hooks = {.before_backward = [] {}}});
        EXPECT_FALSE(outputs[1].requires_grad());
        EXPECT_FALSE(outputs[2].defined());
        EXPECT_TRUE(at::equal(outputs[0], plain[0]));
        EXPECT_TRUE(at::equal(outputs[1], plain[1]));
        (outputs[0].sum() + (outputs[3] * outputs[3]).sum()).backward();
        EXPECT_EQ(toy.num_runs, recompute ? 2 : 1);
        EXPECT_TRUE(at::equal(x.grad(), dx));
        EXPECT_TRUE(at::equal(toy.w.grad(), dw));

        // One output alone, and an input without gradient: parameters have theirs all the same.
        toy.w.mutable_grad().reset();
        const Tensors alone = run_segment({x.detach()}, toy.function(), {.recompute = recompute});
        alone[3].sum().backward();
        EXPECT_TRUE(at::equal(toy.w.grad(), at::ones({3, 3})));
    }
}

TEST(Segment, HooksStandAroundThePasses) {
    for (const bool recompute : {false, true}) {
        Toy toy;
        std::string calls;
        const auto hook = [&calls](const char* name) { return [&calls, name] { calls += name; }; };
        const SegmentFunction function = [&](const Tensors& inputs, ExchangeTape*) {
            calls += "run ";
            return toy(inputs);
        };
        const SegmentHooks hooks{.before_forward = hook("gather "),
                                 .after_forward = hook("free "),
                                 .before_backward = hook("gather again "),
                                 .after_backward = [&] {
                                     EXPECT_TRUE(toy.w.grad().defined());
                                     calls += "free again";
                                 }};
        const at::Tensor x = at::randn({3, 3}).set_requires_grad(true);
        const Tensors outputs =
            run_segment({x}, function, {.recompute = recompute, .hooks = hooks});
        EXPECT_EQ(calls, "gather run free ");
        outputs[0].sum().backward();
        EXPECT_EQ(calls, recompute ? "gather run free gather again run free again"
                                   : "gather run free gather again free again");
        calls.clear();
        const at::NoGradGuard no_grad;
        EXPECT_FALSE(run_segment({x}, function, {.recompute = recompute, .hooks = hooks})[0]
                         .requires_grad());
        EXPECT_EQ(calls, "gather run free ");
    }
}

TEST(Segment, KeepsNeitherActivationsNorItsInputAfterBackward) {
    Toy toy;
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> inner;
    const SegmentFunction function = [&](const Tensors& inputs, ExchangeTape*) {
        const at::Tensor product = at::mm(inputs[0], toy.w);
        const at::Tensor activation = at::tanh(product);
        inner.emplace_back(activation.getIntrusivePtr());
        return Tensors{activation * activation};
    };
    at::Tensor leaf = at::randn({3, 3}).set_requires_grad(true);
    at::Tensor x = leaf * 2;
    const c10::weak_intrusive_ptr<c10::TensorImpl> input(x.getIntrusivePtr());
    const Tensors outputs = run_segment({x}, function, {.recompute = true});
    x.reset();
    EXPECT_TRUE(inner[0].expired()) << "the first pass keeps nothing";
    EXPECT_FALSE(input.expired());
    outputs[0].sum().backward();
    EXPECT_TRUE(inner[1].expired());
    EXPECT_TRUE(input.expired());
}

TEST(Segment, AFailedRecomputeComesOut) {
    Toy toy;
    const SegmentFunction function = [&](const Tensors& inputs, ExchangeTape*) {
        if (toy.num_runs == 1) {
            throw NumericsError("the second pass fails");
        }
        return toy(inputs);
    };
    const at::Tensor x = at::randn({3, 3}).set_requires_grad(true);
    const Tensors outputs = run_segment({x}, function, {.recompute = true});
    EXPECT_THROW(outputs[0].sum().backward(), NumericsError);
}

TEST(Segment, GoesBackwardOnce) {
    for (const bool recompute : {false, true}) {
        Toy toy;
        const at::Tensor x = at::randn({3, 3}).set_requires_grad(true);
        const Tensors outputs = run_segment(
            {x}, toy.function(), {.recompute = recompute, .hooks = {.before_backward = [] {}}});
        const at::Tensor sum = outputs[0].sum();
        sum.backward({}, /*retain_graph=*/true);
        EXPECT_THROW(sum.backward(), UsageError);
    }
}

TEST(Segment, OneInsideAnother) {
    Toy toy;
    const at::Tensor x = at::randn({3, 3}).set_requires_grad(true);
    toy({toy({x})[0]})[0].sum().backward();
    const at::Tensor dx = x.grad().clone(), dw = toy.w.grad().clone();
    for (const bool recompute : {false, true}) {
        x.mutable_grad().reset();
        toy.w.mutable_grad().reset();
        const SegmentFunction outer = [&](const Tensors& inputs, ExchangeTape*) {
            return run_segment({toy(inputs)[0]}, toy.function(), {.recompute = true});
        };
        run_segment({x}, outer, {.recompute = recompute, .hooks = {.before_backward = [] {}}})[0]
            .sum()
            .backward();
        EXPECT_TRUE(at::equal(x.grad(), dx));
        EXPECT_TRUE(at::equal(toy.w.grad(), dw));
    }
}

std::string message_of(const std::function<void()>& action) {
    try {
        action();
    } catch (const UsageError& error) {
        return error.what();
    }
    return "nothing";
}

TEST(Tape, AnEntryIsTakenOnceInItsTurnByItsOp) {
    ExchangeTape tape;
    EXPECT_NE(message_of([&] { (void)tape.take("a"); }).find("a: "), std::string::npos);
    tape.record({.op = "first", .tensors = {at::ones({2}), at::Tensor()}});
    tape.record({.op = "second", .tensors = {at::zeros({2})}});
    tape.start_replay();
    EXPECT_NE(message_of([&] { tape.record({.op = "third", .tensors = {}}); }).find("third: "),
              std::string::npos);
    const std::string out_of_turn = message_of([&] { (void)tape.take("second"); });
    EXPECT_NE(out_of_turn.find("second: "), std::string::npos) << out_of_turn;
    EXPECT_NE(out_of_turn.find("recorded first here"), std::string::npos) << out_of_turn;
    EXPECT_TRUE(at::equal(tape.take("first").tensors[0], at::ones({2})));
    EXPECT_NE(message_of([&] { tape.check_taken(); }).find("second: "), std::string::npos);
    (void)tape.take("second");
    tape.check_taken();
    EXPECT_NE(message_of([&] { (void)tape.take("second"); }).find("2 entries"), std::string::npos);
}

}  // namespace
}  // namespace hybridcp::testing
