// The Hopper backend from inputs to gradients, its kernels in the emulator, by the rules of the
// fused backend.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "gdn_cuda/emulated_launch.h"
#include "kernels/gdn/backends.h"
#include "kernels/gdn_fused_check.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

std::vector<FusedVariant> emulated(std::uint64_t seed, const gdn::CudaLimits& limits = {}) {
    return {{"emulated", [=](const GdnCase& c) {
                 set_emulated_seed(seed);
                 return gdn::make_cuda_call(gdn::make_problem(c.inputs, c.offsets, c.options),
                                            limits);
             }}};
}

const std::map<std::string, double> kBars{{"dk", 6e-3}, {"dbeta", 6e-3}, {"dg", 8e-3}};
const std::map<std::string, double> kFewBars{
    {"dk", 3e-3}, {"dbeta", 5e-3}, {"dg", 4e-3}};  // dbeta is bf16
constexpr double kBar = 5e-3, kFp16Bar = 3e-3;

TEST(HopperCall, SegmentsOfSeveralChunks) {
    for (const std::int64_t group : {1, 2, 4}) {
        const GdnCase c =
            bf16_case({0, 300, 300, 413}, 1, group, 20 + static_cast<uint64_t>(group));
        SCOPED_TRACE(group);
        const Tensors expected = run_all(GdnBackend::kReference, with_dtype(c, at::kDouble));
        expect_close(run_all(*emulated(3)[0].make_call(c), c), expected, kFewBars, kFp16Bar);
        expect_close(run_all(*emulated(3, {.fp16_tokens = 112})[0].make_call(c), c), expected,
                     kBars, kBar);
    }
}

TEST(HopperCall, PartsOfHeadsAreTheWhole) {
    GdnCase c = strided(bf16_case({0, 70, 135}, 3, 6, 9));
    c.inputs.g = c.inputs.g.to(at::kFloat);
    int launches = emulated_launches();
    const auto whole = emulated(4)[0].make_call(c);
    const Tensors expected = run_all(*whole, c);
    // Magnitudes and forward, magnitudes, state gradient, gradients.
    EXPECT_EQ(emulated_launches() - launches, 5);
    struct Parts {
        gdn::CudaLimits limits;
        int launches;
    };
    for (const auto& [limits, of_backward] :
         {Parts{{.kept_image_bytes = 1}, 3 * 2},  // of what is kept; one key head at once
          Parts{{.image_bytes = 1, .kept_bytes = 0}, 3 * 3},
          Parts{{.image_bytes = 2 * 2 * 3 * 70656, .kept_bytes = 0}, 2 * 3}}) {
        launches = emulated_launches();
        const auto call = emulated(5, limits)[0].make_call(c);
        const Tensors actual = run_all(*call, c);
        EXPECT_EQ(emulated_launches() - launches, 3 + of_backward);
        for (const auto& [name, x] : expected) {
            EXPECT_TRUE(at::equal(actual.at(name), x)) << name;
        }
        EXPECT_TRUE(at::equal(call->gradient_summary(c.d_o), whole->gradient_summary(c.d_o)));
    }
}

// Segments of three runs and of one, a head at once; head 0 remembers all of its segment.
TEST(HopperCall, RunsBeginWithCheckpoints) {
    GdnCase c = bf16_case({0, 1030, 1060}, 2, 2, 31);
    c.inputs.g.select(1, 0).mul_(1e-3);
    const auto limits = [](std::int64_t fp16_tokens) {
        return gdn::CudaLimits{.image_bytes = 1, .kept_bytes = 0, .fp16_tokens = fp16_tokens};
    };
    const Tensors expected = run_all(GdnBackend::kReference, with_dtype(c, at::kDouble));
    expect_close(run_all(*emulated(8, limits(1029))[0].make_call(c), c), expected, kBars, kBar);
    expect_close(run_all(*emulated(8, limits(1030))[0].make_call(c), c), expected, kFewBars,
                 kFp16Bar);
}

// What forward keeps of its runs and what backward makes again are the same bits; E has three
// places here. Head 0 remembers all of its segment.
TEST(HopperCall, AShareKeptIsTheWhole) {
    GdnCase c = bf16_case({0, 1030, 1060}, 1, 3, 33);
    c.inputs.g.select(1, 0).mul_(1e-3);
    for (const std::int64_t fp16_tokens : {1029, 1030}) {
        c.options.kept_share = 1.0;
        const Tensors expected =
            run_all(*emulated(9, {.fp16_tokens = fp16_tokens})[0].make_call(c), c);
        for (const double share : {0.0, 0.4}) {
            SCOPED_TRACE(fmt::format("{} up to {} tokens", share, fp16_tokens));
            c.options.kept_share = share;
            const auto call = emulated(10, {.fp16_tokens = fp16_tokens})[0].make_call(c);
            const Tensors actual = run_all(*call, c);
            for (const auto& [name, x] : expected) {
                EXPECT_TRUE(at::equal(actual.at(name), x)) << name;
            }
            // Again, of images that are all made again.
            const Tensor dv = call->backward(c.d_o, c.dS_end).dv;
            EXPECT_TRUE(at::equal(dv, expected.at("dv")));
        }
    }
}

// Two key heads of four value heads each, of which forward keeps a share, one key head at once.
TEST(HopperCall, PartsOfAKeptShareAreTheWhole) {
    GdnCase c = bf16_case({0, 200, 460}, 2, 8, 34);
    const Tensors expected = run_all(*emulated(11)[0].make_call(c), c);
    c.options.kept_share = 0.5;
    const Tensors actual = run_all(*emulated(12, {.kept_image_bytes = 1})[0].make_call(c), c);
    for (const auto& [name, x] : expected) {
        EXPECT_TRUE(at::equal(actual.at(name), x)) << name;
    }
}

TEST(HopperCall, SmallerHeadDimsAndSummaries) {
    const GdnCase c = with_dtype(
        generated_case({{0, 0, 90, 100, 164, 230, 300}, 303, 1, 2, 40, 24}, 12), at::kBFloat16);
    const GdnCase wide = with_dtype(c, at::kDouble);
    const auto call = emulated(6)[0].make_call(c);
    const auto reference =
        make_gdn_call(GdnBackend::kReference, wide.inputs, wide.offsets, wide.options);
    const GdnSummary summary = call->summary(), expected = reference->summary();
    EXPECT_LE(worst_head_error(summary.S, expected.S), kBar);
    EXPECT_LE(worst_head_error(summary.M, expected.M), kBar);
    expect_close(run_all(*call, c), run_all(*reference, wide), kBars, kBar);
    EXPECT_LE(
        worst_head_error(call->gradient_summary(c.d_o), reference->gradient_summary(wide.d_o)),
        kBar);
}

// The first segment is walked in two parts, with operands in bf16, or four, in fp16.
TEST(HopperCall, SummariesOfParts) {
    for (const gdn::CudaLimits& limits :
         {gdn::CudaLimits{.chunks_of_two_summary_parts = 8, .fp16_tokens = 1},
          gdn::CudaLimits{.chunks_of_two_summary_parts = 4}}) {
        SCOPED_TRACE(limits.chunks_of_two_summary_parts);
        check_uneven_summaries(emulated(10, limits)[0]);
    }
}

// Two pieces, which reach back differently far.
TEST(HopperCall, UnevenGates) {
    GdnCase c = uneven_case(2100);
    c.options.kept_share = 0.5;
    expect_close(run_all(*emulated(15, {.fp16_tokens = 4096})[0].make_call(c), c),
                 run_all(GdnBackend::kReference, with_dtype(c, at::kDouble)), kFewBars, kFp16Bar);
}

// Few large numbers among many small ones: fp16 must hold both.
TEST(HopperCall, HeavyTails) {
    const auto tails = [](const Tensor& x) {
        const at::Generator generator = at::detail::createCPUGenerator(3);
        const Tensor sizes = at::randn({x.size(0), x.size(1), 1}, generator);
        return (x.to(at::kFloat) * at::exp(3 * sizes)).to(x.scalar_type());
    };
    for (const int power : {0, 10, 13}) {
        SCOPED_TRACE(power);
        GdnCase c = bf16_case({0, 700}, 1, 2, 17);
        c.S_start = c.dS_end = Tensor();
        if (power == 0) {
            c.inputs.v = tails(c.inputs.v);
            c.d_o = tails(c.d_o);
        } else {
            c.d_o[400].select(1, 5).fill_(std::exp2(power));
        }
        if (power == 13) {
            c.inputs.g.fill_(-2);
        }
        expect_close(run_all(*emulated(16)[0].make_call(c), c),
                     run_all(GdnBackend::kReference, with_dtype(c, at::kDouble)), kFewBars,
                     kFp16Bar);
    }
}

// Nothing decays, and all adds up: 2,048 tokens of one key or query.
TEST(HopperCall, Fp16HoldsWhatGrows) {
    for (const bool reflects : {true, false}) {
        SCOPED_TRACE(reflects);
        GdnCase c = bf16_case({0, 2048}, 1, 1, 17);
        c.S_start = c.dS_end = Tensor();
        c.inputs.g.zero_();
        const auto repeated = [](const Tensor& x) {
            return x.slice(0, 0, 1).expand_as(x).contiguous();
        };
        c.inputs.q = repeated(c.inputs.q);
        c.d_o = repeated(c.d_o);
        c.inputs.beta.fill_(reflects ? 2.0 : 0.0);
        if (reflects) {
            const Tensor signs =
                (1 - 2 * at::arange(2048).remainder(2)).view({-1, 1, 1}).to(at::kBFloat16);
            c.inputs.k = c.inputs.q;
            c.inputs.v = repeated(c.inputs.v) * signs;
            c.d_o = c.d_o * signs;
        }
        for (const auto& [name, x] : run_all(*emulated(17)[0].make_call(c), c)) {
            EXPECT_TRUE(x.isfinite().all().item<bool>()) << name;
        }
    }
}

// Heads first in memory, or q and k by turns.
TEST(HopperCall, HeadsThatDoNotAdjoin) {
    const GdnCase c = bf16_case({0, 70, 100}, 2, 4, 18);
    const auto heads_first = [](const Tensor& x) {
        return x.transpose(0, 1).contiguous().transpose(0, 1);
    };
    GdnCase apart = c;
    apart.inputs.q = at::cat({c.inputs.q, c.inputs.k}, -1).narrow(2, 0, 128);
    apart.inputs.k = heads_first(c.inputs.k);
    apart.inputs.v = heads_first(c.inputs.v);
    apart.d_o = heads_first(c.d_o);
    const Tensors expected = run_all(*emulated(18)[0].make_call(c), c);
    for (const auto& [name, x] : run_all(*emulated(18)[0].make_call(apart), apart)) {
        EXPECT_TRUE(at::equal(x, expected.at(name))) << name;
    }
}

// All a head's gradients may come from its states alone.
TEST(HopperCall, FewTokens) {
    for (const std::int64_t tokens : {1, 2, 65}) {
        for (const std::uint64_t seed : {41, 42, 43}) {
            const GdnCase c = bf16_case({0, tokens}, 2, 4, seed);
            SCOPED_TRACE(fmt::format("{} tokens, seed {}", tokens, seed));
            expect_close(run_all(*emulated(seed)[0].make_call(c), c),
                         run_all(GdnBackend::kReference, with_dtype(c, at::kDouble)), kFewBars,
                         kBar);
        }
    }
}

/// v and start states, and d_o and dS_end, of each head times powers of two.
GdnCase scaled(GdnCase c, const std::vector<int>& values, const std::vector<int>& gradients) {
    for (Tensor* x : {&c.inputs.v, &c.S_start, &c.d_o, &c.dS_end}) {
        *x = x->clone();
    }
    for (std::int64_t head = 0; head < c.inputs.v.size(1); ++head) {
        const auto at = static_cast<std::size_t>(head);
        for (Tensor* x : {&c.inputs.v, &c.S_start}) {
            x->select(1, head).mul_(std::exp2(values[at]));
        }
        for (Tensor* x : {&c.d_o, &c.dS_end}) {
            x->select(1, head).mul_(std::exp2(gradients[at]));
        }
    }
    return c;
}

// Gradients times powers of two, to the last bit but where dq and dk are sums of heads.
TEST(HopperCall, ScalesOfHeadsDoNotMatter) {
    const GdnCase c = bf16_case({0, 70, 135}, 1, 2, 51);
    const Tensors plain = run_all(*emulated(1)[0].make_call(c), c);
    const std::vector<std::vector<int>> scales = {
        {10, 10, -23, -23}, {-66, -66, 66, 66}, {0, 20, 0, -40}, {-30, 30, 60, -60}};
    for (const auto& s : scales) {
        const GdnCase other = scaled(c, {s[0], s[1]}, {s[2], s[3]});
        SCOPED_TRACE(fmt::format("2^({}, {}), 2^({}, {})", s[0], s[1], s[2], s[3]));
        const Tensors actual = run_all(*emulated(2)[0].make_call(other), other);
        expect_close(actual, run_all(GdnBackend::kReference, with_dtype(other, at::kDouble)), kBars,
                     kBar);
        for (std::int64_t head = 0; head < 2; ++head) {
            const auto at = static_cast<std::size_t>(head);
            const double both = std::exp2(s[at] + s[at + 2]);
            for (const auto& [name, power] : std::map<std::string, double>{
                     {"dv", std::exp2(s[at + 2])}, {"dg", both}, {"dbeta", both}}) {
                EXPECT_TRUE(at::equal(actual.at(name).select(1, head),
                                      plain.at(name).select(1, head) * power))
                    << name << head;
            }
        }
    }
}

TEST(HopperCall, NanAndInfinityStayInTheirHead) {
    const GdnCase c = bf16_case({0, 70}, 2, 2, 61);
    const Tensors clean = run_all(*emulated(1)[0].make_call(c), c);
    for (const double bad : {std::nan(""), double{INFINITY}}) {
        for (const bool in_gradient : {false, true}) {
            GdnCase spoilt = c;
            Tensor& x = in_gradient ? spoilt.d_o : spoilt.inputs.v;
            x = x.clone();
            x[3][0][5] = bad;
            const Tensors actual = run_all(*emulated(2)[0].make_call(spoilt), spoilt);
            for (const char* name : {"dq", "dk", "dv", "dg", "dbeta", "dS_start"}) {
                SCOPED_TRACE(fmt::format("{} in {}: {}", bad, in_gradient ? "d_o" : "v", name));
                const Tensor& gradient = actual.at(name);
                EXPECT_TRUE(at::equal(gradient.select(1, 1), clean.at(name).select(1, 1)));
                if (in_gradient || std::string(name) == "dg") {
                    EXPECT_FALSE(gradient.select(1, 0).isfinite().all().item<bool>());
                }
            }
        }
    }
}

// Nothing is forgotten: what the second segment hands to the first is all that it knows of it.
TEST(HopperCall, GradientsOfStatesChainWithoutDecay) {
    GdnCase whole = bf16_case({0, 600}, 1, 1, 71);
    whole.inputs.g = at::zeros_like(whole.inputs.g);
    const Tensor expected =
        run_all(GdnBackend::kReference, with_dtype(whole, at::kDouble)).at("dS_start");
    Tensor gradient = whole.dS_end;
    for (const std::int64_t begin : {400, 200, 0}) {
        GdnCase part = whole;
        const auto rows = [begin](const Tensor& x) { return x.slice(0, begin, begin + 200); };
        const GdnInputs& in = whole.inputs;
        part.inputs = {rows(in.q), rows(in.k), rows(in.v), rows(in.g), rows(in.beta)};
        part.offsets = {0, 200};
        part.d_o = rows(whole.d_o);
        part.dS_end = gradient;
        gradient = run_all(*emulated(3)[0].make_call(part), part).at("dS_start");
    }
    EXPECT_LE(worst_head_error(gradient, expected), 1e-3);
}

TEST(HopperCall, NoTokens) {
    for (const std::vector<std::int64_t>& offsets :
         {std::vector<std::int64_t>{0, 0, 0}, std::vector<std::int64_t>{0}}) {
        const GdnCase c = bf16_case(offsets, 1, 2, 13);
        const auto call = emulated(7)[0].make_call(c);
        const Tensors actual = run_all(*call, c);
        EXPECT_TRUE(at::equal(actual.at("S_end"), c.S_start));
        EXPECT_TRUE(at::equal(actual.at("dS_start"), c.dS_end));
        EXPECT_EQ(call->summary().S.count_nonzero().item<std::int64_t>(), 0);
        EXPECT_EQ(call->gradient_summary(c.d_o).count_nonzero().item<std::int64_t>(), 0);
    }
}

TEST(HopperCall, GeneratedCases) {
    const auto cases = fused_cases({{128, 128}});
    BarCount count;
    for (std::size_t n = 0; n < cases.size(); n += 19) {
        const GdnCase& c = cases[n].gdn_case;
        if (cases[n].regime->bf16 && c.d_o.defined() && c.options.scale != 0.0 &&
            c.inputs.v.size(1) <= 4) {
            check_bf16(cases[n], emulated(n), count,
                       {.emulations = cuda_emulations(), .beyond_bf16 = true});
        }
    }
}

}  // namespace
}  // namespace hybridcp::test
