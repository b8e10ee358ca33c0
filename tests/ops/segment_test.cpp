// A segment gives the bits of the same code without it, kept or recomputed, and nothing stays
// behind after backward; its tape gives each entry once, in its turn.
#include "ops/segment.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "hybridcp/error.h"

namespace hybridcp::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

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
