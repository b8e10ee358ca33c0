// Eager against the recurrence in fp64 on generated problems: odd lengths, grouped heads, K != V,
// empty segments, padding, strides, dtypes; and what must hold exactly.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <limits>

#include "hybridcp/error.h"
#include "kernels/gdn_support.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

constexpr double kBar = 1e-5;  // golden README, section 8: fp32, plain gates

void expect_matches_reference(const GdnCase& gdn_case, double bar = kBar) {
    expect_close(run_all(GdnBackend::kEager, gdn_case), run_all(GdnBackend::kReference, gdn_case),
                 {}, bar);
}

void expect_identical(const Tensors& a, const Tensors& b) {
    for (const auto& [name, x] : a) {
        EXPECT_TRUE(at::equal(x, b.at(name))) << name;
    }
}

TEST(GdnGenerated, LengthsAroundChunkBoundaries) {
    for (const std::int64_t T : {0, 1, 2, 15, 31, 33, 63, 64, 65, 127, 128, 300}) {
        for (const std::int64_t chunk_size : {64, 32}) {
            SCOPED_TRACE(fmt::format("T {} chunk {}", T, chunk_size));
            GdnCase gdn_case =
                generated_case({{0, T}, T, 1, 2, 16, 24}, 100 + static_cast<std::uint64_t>(T));
            gdn_case.options.chunk_size = chunk_size;
            expect_matches_reference(gdn_case);
        }
    }
}

TEST(GdnGenerated, GroupsAndDims) {
    for (const std::int64_t group : {1, 2, 3, 4}) {
        for (const auto& [K, V] : {std::pair{32, 8}, std::pair{5, 40}}) {
            SCOPED_TRACE(fmt::format("group {} K {} V {}", group, K, V));
            expect_matches_reference(generated_case({{0, 70, 100}, 100, 2, 2 * group, K, V}, 7));
        }
    }
}

TEST(GdnGenerated, SegmentsOfAnyLength) {
    const std::vector<std::vector<std::int64_t>> offset_lists = {
        {0, 0, 40, 105},                 // empty first
        {0, 40, 40, 40, 105},            // empty in the middle
        {0, 40, 105, 105, 105},          // empty last
        {0, 0, 0},                       // all empty
        {0},                             // none
        {0, 1, 2, 3, 68, 68, 200, 264},  // many chunks after few
        {0, 200, 201, 265, 330, 331},    // few after many
        {0, 64, 128, 192},               // all full
    };
    for (const auto& offsets : offset_lists) {
        for (const std::int64_t padding : {0, 13}) {
            SCOPED_TRACE(fmt::format("{} segments, {} tokens, padding {}", offsets.size() - 1,
                                     offsets.back(), padding));
            GdnCase gdn_case = generated_case({offsets, offsets.back() + padding, 2, 4, 16, 8}, 11);
            // What stands in the padding must not matter.
            for (Tensor* x :
                 {&gdn_case.inputs.q, &gdn_case.inputs.k, &gdn_case.inputs.v, &gdn_case.d_o}) {
                x->narrow(0, offsets.back(), padding)
                    .fill_(std::numeric_limits<float>::quiet_NaN());
            }
            const Tensors actual = run_all(GdnBackend::kEager, gdn_case);
            expect_close(actual, run_all(GdnBackend::kReference, gdn_case), {}, kBar);
            for (const char* name : {"o", "dq", "dk", "dv", "dg", "dbeta"}) {
                const Tensor tail = actual.at(name).narrow(0, offsets.back(), padding);
                EXPECT_TRUE(at::equal(tail, at::zeros_like(tail))) << name;
            }
        }
    }
}

TEST(GdnGenerated, EmptySegmentPassesStateThrough) {
    const GdnCase gdn_case = generated_case({{0, 30, 30, 70}, 70, 1, 2, 16, 16}, 3);
    const Tensors actual = run_all(GdnBackend::kEager, gdn_case);
    EXPECT_TRUE(at::equal(actual.at("S_end")[1], gdn_case.S_start[1]));
    EXPECT_TRUE(at::equal(actual.at("dS_start")[1], gdn_case.dS_end[1]));
}

TEST(GdnGenerated, Options) {
    GdnCase gdn_case = generated_case({{0, 100}, 100, 2, 4, 16, 16}, 5);
    for (const double scale : {0.0, 1.5}) {
        gdn_case.options.scale = scale;
        expect_matches_reference(gdn_case);
    }
    // Unnormalised keys: the state grows with beta |k|^2 > 2, so that only short ones stay finite.
    gdn_case.options = {.use_qk_l2norm = false};
    gdn_case.inputs.k = gdn_case.inputs.k * 0.3;
    expect_matches_reference(gdn_case);
    gdn_case.inputs.k = gdn_case.inputs.k * 4;
    gdn_case.inputs.g = gdn_case.inputs.g - 3;
    expect_matches_reference(gdn_case, 5e-5);
}

TEST(GdnGenerated, BetaAboveOne) {
    GdnCase gdn_case = generated_case({{0, 150}, 150, 1, 2, 16, 16}, 6);
    gdn_case.inputs.beta = gdn_case.inputs.beta * 2;
    expect_matches_reference(gdn_case);
}

TEST(GdnGenerated, GatesSlightlyAboveZero) {
    GdnCase gdn_case = generated_case({{0, 150}, 150, 1, 2, 16, 16}, 6);
    gdn_case.inputs.g = at::randn_like(gdn_case.inputs.g) * 1e-3;
    expect_matches_reference(gdn_case);
}

TEST(GdnGenerated, ResetsAtAnyPlace) {
    GdnCase gdn_case = generated_case({{0, 130, 140}, 140, 1, 2, 16, 16}, 8);
    for (const std::int64_t token : {0, 1, 63, 64, 65, 129, 130, 139}) {
        gdn_case.inputs.g[token][token % 2] = -std::numeric_limits<float>::infinity();
    }
    const Tensors actual = run_all(GdnBackend::kEager, gdn_case);
    expect_close(actual, run_all(GdnBackend::kReference, gdn_case), {}, kBar);
    const Tensor at_resets = actual.at("dg").masked_select(gdn_case.inputs.g.isinf());
    EXPECT_EQ(at_resets.count_nonzero().item<std::int64_t>(), 0);
}

TEST(GdnGenerated, StridedInputs) {
    const GdnCase contiguous = generated_case({{0, 65, 128}, 128, 2, 4, 16, 8}, 9);
    GdnCase strided = contiguous;
    const GdnInputs& in = contiguous.inputs;
    const Tensor packed = at::cat({in.q.flatten(1), in.k.flatten(1), in.v.flatten(1)}, 1);
    strided.inputs.q = packed.narrow(1, 0, 32).unflatten(1, {2, 16});
    strided.inputs.k = packed.narrow(1, 32, 32).unflatten(1, {2, 16});
    strided.inputs.v = packed.narrow(1, 64, 32).unflatten(1, {4, 8});
    strided.inputs.g = in.g.t().contiguous().t();
    strided.inputs.beta = at::stack({in.beta, in.beta}, -1).select(-1, 1);
    strided.d_o = contiguous.d_o.transpose(0, 2).contiguous().transpose(0, 2);
    strided.S_start = contiguous.S_start.mT().contiguous().mT();
    strided.dS_end = contiguous.dS_end.mT().contiguous().mT();
    for (const GdnBackend backend : {GdnBackend::kEager, GdnBackend::kReference}) {
        expect_identical(run_all(backend, contiguous), run_all(backend, strided));
    }
    // One segment of whole chunks takes the path without an index.
    GdnCase one = contiguous;
    GdnCase one_strided = strided;
    for (GdnCase* gdn_case : {&one, &one_strided}) {
        gdn_case->offsets = {0, 128};
        gdn_case->S_start = gdn_case->S_start.narrow(0, 0, 1);
        gdn_case->dS_end = gdn_case->dS_end.narrow(0, 0, 1);
    }
    expect_identical(run_all(GdnBackend::kEager, one), run_all(GdnBackend::kEager, one_strided));
    expect_matches_reference(one_strided);
}

TEST(GdnGenerated, UndefinedMeansZero) {
    for (const GdnBackend backend : {GdnBackend::kEager, GdnBackend::kReference}) {
        GdnCase zeros = generated_case({{0, 20, 90}, 90, 1, 2, 16, 16}, 10);
        GdnCase undefined = zeros;
        zeros.S_start.zero_();
        undefined.S_start = Tensor();
        expect_identical(run_all(backend, zeros), run_all(backend, undefined));
        zeros.dS_end.zero_();
        undefined.dS_end = Tensor();
        expect_identical(run_all(backend, zeros), run_all(backend, undefined));
        zeros.d_o.zero_();
        undefined.d_o = Tensor();
        expect_identical(run_all(backend, zeros), run_all(backend, undefined));
    }
}

TEST(GdnGenerated, OneSegmentPerCallOrAllInOne) {
    const GdnCase all = generated_case({{0, 33, 33, 97, 98}, 98, 1, 2, 16, 16}, 12);
    const Tensors together = run_all(GdnBackend::kEager, all);
    for (std::size_t i = 0; i + 1 < all.offsets.size(); ++i) {
        const std::int64_t begin = all.offsets[i];
        const std::int64_t length = all.offsets[i + 1] - begin;
        const auto n = static_cast<std::int64_t>(i);
        GdnCase alone = all;
        for (Tensor* x : {&alone.inputs.q, &alone.inputs.k, &alone.inputs.v, &alone.inputs.g,
                          &alone.inputs.beta, &alone.d_o}) {
            *x = x->narrow(0, begin, length);
        }
        alone.offsets = {0, length};
        alone.S_start = all.S_start.narrow(0, n, 1);
        alone.dS_end = all.dS_end.narrow(0, n, 1);
        for (const auto& [name, x] : run_all(GdnBackend::kEager, alone)) {
            const bool is_state = name == "S_end" || name == "dS_start";
            const Tensor part = is_state ? together.at(name).narrow(0, n, 1)
                                         : together.at(name).narrow(0, begin, length);
            EXPECT_LE(worst_head_error(x, part), 1e-6) << name << " of segment " << i;
        }
    }
}

TEST(GdnGenerated, RepeatsExactly) {
    const GdnCase gdn_case = generated_case({{0, 40, 150}, 150, 2, 4, 32, 16}, 13);
    const Tensor q = gdn_case.inputs.q.clone();
    const Tensor d_o = gdn_case.d_o.clone();
    for (const GdnBackend backend : {GdnBackend::kEager, GdnBackend::kReference}) {
        const Tensors first = run_all(backend, gdn_case);
        for (int repeat = 0; repeat < 10; ++repeat) {
            expect_identical(first, run_all(backend, gdn_case));
        }
        const auto call =
            make_gdn_call(backend, gdn_case.inputs, gdn_case.offsets, gdn_case.options);
        // summary() and gradient_summary() leave work behind for forward() and backward().
        const GdnSummary summary = call->summary();
        EXPECT_TRUE(at::equal(call->forward(gdn_case.S_start).o, first.at("o")));
        call->release_intermediates();  // and what they leave can be made again
        const Tensor d_local = call->gradient_summary(gdn_case.d_o);
        for (int repeat = 0; repeat < 2; ++repeat) {
            const GdnGradients gradients = call->backward(gdn_case.d_o, gdn_case.dS_end);
            EXPECT_TRUE(at::equal(gradients.dq, first.at("dq")));
            EXPECT_TRUE(at::equal(gradients.dg, first.at("dg")));
            EXPECT_TRUE(at::equal(gradients.dS_start, first.at("dS_start")));
        }
        EXPECT_TRUE(at::equal(call->gradient_summary(gdn_case.d_o), d_local));
        call->release_intermediates();
        EXPECT_TRUE(at::equal(call->summary().M, summary.M));
        call->release_intermediates();
        EXPECT_TRUE(at::equal(call->forward(gdn_case.S_start).S_end, first.at("S_end")));
    }
    EXPECT_TRUE(at::equal(gdn_case.inputs.q, q));
    EXPECT_TRUE(at::equal(gdn_case.d_o, d_o));
}

TEST(GdnGenerated, BackwardSeesNewValuesInTheSameGradientTensor) {
    const GdnCase gdn_case = generated_case({{0, 70}, 70, 1, 2, 16, 16}, 14);
    const auto call =
        make_gdn_call(GdnBackend::kEager, gdn_case.inputs, gdn_case.offsets, gdn_case.options);
    (void)call->forward(gdn_case.S_start);
    const Tensor d_o = gdn_case.d_o.clone();
    (void)call->gradient_summary(d_o);
    d_o.mul_(2);
    const Tensor doubled = call->backward(d_o, Tensor()).dv;
    EXPECT_TRUE(at::equal(doubled, call->backward(gdn_case.d_o * 2, Tensor()).dv));
}

TEST(GdnGenerated, NanStaysInItsHeadAndSegment) {
    GdnCase gdn_case = generated_case({{0, 50, 120}, 120, 2, 4, 16, 16}, 15);
    const Tensors clean = run_all(GdnBackend::kEager, gdn_case);
    gdn_case.inputs.v = gdn_case.inputs.v.clone();
    gdn_case.inputs.v[10][2] = std::numeric_limits<float>::quiet_NaN();
    const Tensors dirty = run_all(GdnBackend::kEager, gdn_case);
    EXPECT_TRUE(dirty.at("o").narrow(0, 0, 50).select(1, 2).isnan().any().item<bool>());
    for (const auto& [name, x] : clean) {
        const bool is_state = name == "S_end" || name == "dS_start";
        const bool by_key_head = name == "dq" || name == "dk";
        for (std::int64_t head = 0; head < x.size(1); ++head) {
            if (head != (by_key_head ? 1 : 2)) {
                EXPECT_TRUE(at::equal(x.select(1, head), dirty.at(name).select(1, head)))
                    << name << head;
            }
        }
        const auto second_segment = [&](const Tensor& y) {
            return is_state ? y.narrow(0, 1, 1) : y.narrow(0, 50, 70);
        };
        EXPECT_TRUE(at::equal(second_segment(x), second_segment(dirty.at(name)))) << name;
    }
}

TEST(GdnGenerated, OutputsHaveTheDtypesOfTheirInputs) {
    GdnCase gdn_case = with_dtype(generated_case({{0, 20}, 20, 1, 2, 16, 16}, 16), at::kBFloat16);
    gdn_case.inputs.g = gdn_case.inputs.g.to(at::kDouble);
    gdn_case.inputs.beta = gdn_case.inputs.beta.to(at::kFloat);
    for (const GdnBackend backend : {GdnBackend::kEager, GdnBackend::kReference}) {
        const Tensors actual = run_all(backend, gdn_case);
        for (const char* name : {"o", "dq", "dk", "dv"}) {
            EXPECT_EQ(actual.at(name).scalar_type(), at::kBFloat16) << name;
        }
        EXPECT_EQ(actual.at("dg").scalar_type(), at::kDouble);
        EXPECT_EQ(actual.at("dbeta").scalar_type(), at::kFloat);
        const at::ScalarType state = backend == GdnBackend::kEager ? at::kFloat : at::kDouble;
        EXPECT_EQ(actual.at("S_end").scalar_type(), state);
        EXPECT_EQ(actual.at("dS_start").scalar_type(), state);
    }
}

TEST(GdnGenerated, RefusesWhatDoesNotFit) {
    const GdnCase good = generated_case({{0, 20}, 20, 2, 4, 16, 8}, 17);
    const auto refused = [&](auto&& change) {
        GdnCase bad = good;
        change(bad);
        EXPECT_THROW((void)make_gdn_call(GdnBackend::kEager, bad.inputs, bad.offsets, bad.options),
                     UsageError);
    };
    refused([](GdnCase& c) { c.inputs.q = Tensor(); });
    refused([](GdnCase& c) { c.inputs.k = c.inputs.k.narrow(0, 0, 19); });
    refused([](GdnCase& c) { c.inputs.v = c.inputs.v.narrow(0, 0, 19); });
    refused([](GdnCase& c) { c.inputs.v = c.inputs.v.narrow(1, 0, 3); });
    refused([](GdnCase& c) { c.inputs.g = c.inputs.g.narrow(1, 0, 2); });
    refused([](GdnCase& c) { c.inputs.beta = c.inputs.beta.unsqueeze(-1); });
    refused([](GdnCase& c) { c.inputs.q = c.inputs.q.to(at::kHalf); });
    refused([](GdnCase& c) { c.inputs.v = c.inputs.v.to(at::kBFloat16); });
    refused([](GdnCase& c) { c.inputs.g = c.inputs.g.to(at::kBFloat16); });
    refused([](GdnCase& c) { c.offsets = {}; });
    refused([](GdnCase& c) { c.offsets = {1, 20}; });
    refused([](GdnCase& c) { c.offsets = {0, 12, 11}; });
    refused([](GdnCase& c) { c.offsets = {0, 21}; });
    refused([](GdnCase& c) { c.options.chunk_size = 0; });
    // Three value heads cannot share two key heads.
    refused([](GdnCase& c) {
        for (Tensor* x : {&c.inputs.v, &c.inputs.g, &c.inputs.beta}) {
            *x = x->narrow(1, 0, 3);
        }
    });
    for (const GdnBackend backend : {GdnBackend::kEager, GdnBackend::kReference}) {
        const auto call = make_gdn_call(backend, good.inputs, good.offsets, good.options);
        EXPECT_THROW((void)call->backward(good.d_o, good.dS_end), Error);  // no forward() yet
        EXPECT_THROW((void)call->forward(good.S_start.narrow(1, 0, 2)), UsageError);
        (void)call->forward(good.S_start);
        EXPECT_THROW((void)call->backward(good.d_o.narrow(0, 0, 5), good.dS_end), UsageError);
        EXPECT_THROW((void)call->backward(good.d_o, good.dS_end.mT()), UsageError);
    }
}

TEST(GdnGenerated, ReferenceGradientsByFiniteDifferences) {
    GdnCase gdn_case = with_dtype(generated_case({{0, 5, 12}, 13, 1, 2, 4, 3}, 18), at::kDouble);
    gdn_case.inputs.g = gdn_case.inputs.g.to(at::kDouble);
    gdn_case.S_start = gdn_case.S_start.to(at::kDouble);
    gdn_case.dS_end = gdn_case.dS_end.to(at::kDouble);
    const Tensors gradients = run_all(GdnBackend::kReference, gdn_case);
    const auto loss = [&](const GdnCase& c) {
        const auto call = make_gdn_call(GdnBackend::kReference, c.inputs, c.offsets, c.options);
        const GdnOutput output = call->forward(c.S_start);
        return ((output.o * c.d_o).sum() + (output.S_end * c.dS_end).sum()).item<double>();
    };
    const auto check = [&](const char* name, const std::function<Tensor&(GdnCase&)>& input) {
        const Tensor direction = at::randn_like(gradients.at(name));
        const double step = 1e-5;
        GdnCase up = gdn_case;
        GdnCase down = gdn_case;
        input(up) = input(up) + direction * step;
        input(down) = input(down) - direction * step;
        const double slope = (loss(up) - loss(down)) / (2 * step);
        const double expected = (gradients.at(name) * direction).sum().item<double>();
        EXPECT_NEAR(slope, expected, 1e-6 * std::max(1.0, std::abs(expected))) << name;
    };
    check("dq", [](GdnCase& c) -> Tensor& { return c.inputs.q; });
    check("dk", [](GdnCase& c) -> Tensor& { return c.inputs.k; });
    check("dv", [](GdnCase& c) -> Tensor& { return c.inputs.v; });
    check("dg", [](GdnCase& c) -> Tensor& { return c.inputs.g; });
    check("dbeta", [](GdnCase& c) -> Tensor& { return c.inputs.beta; });
    check("dS_start", [](GdnCase& c) -> Tensor& { return c.S_start; });
}

}  // namespace
}  // namespace hybridcp::test
