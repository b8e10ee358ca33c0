// What must hold for bits in the fused backend: repeats, thread counts, strides, a head or a
// segment alone or among others, NaN that stays where it is, inputs unchanged; and what it refuses.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <limits>

#include "hybridcp/error.h"
#include "kernels/gdn_fused_cases.h"
#include "kernels/gdn_fused_variants.h"
#include "kernels/simd/isa.h"

namespace hybridcp::test {
namespace {

using at::Tensor;

/// Segments over more than one checkpoint of the backward pass, empty ones, padding.
GdnCase exact_case() {
    return generated_case({{0, 0, 70, 70, 75, 365}, 370, 2, 6, 40, 24}, 31);
}

/// body(case, variant) for fp32 and bf16 inputs and all forms of the backend that take them.
void for_each_form(const GdnCase& gdn_case,
                   const std::function<void(const GdnCase&, const FusedVariant&)>& body) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
        SCOPED_TRACE(c10::toString(type));
        const GdnCase typed = with_dtype(gdn_case, type);
        for (const FusedVariant& variant : fused_bf16_variants()) {
            SCOPED_TRACE(variant.name);
            body(typed, variant);
        }
    }
}

Tensors run(const FusedVariant& variant, const GdnCase& gdn_case) {
    const auto call = variant.make_call(gdn_case);
    const GdnSummary summary = call->summary();
    Tensors result = run_all(*call, gdn_case);
    result["S"] = summary.S;
    result["M"] = summary.M;
    result["dS"] = call->gradient_summary(gdn_case.d_o);
    return result;
}

/// Bits are equal; NaN equals NaN.
void expect_same_bits(const Tensors& a, const Tensors& b) {
    for (const auto& [name, x] : a) {
        EXPECT_TRUE(at::allclose(x, b.at(name), 0, 0, true)) << name;
    }
}

bool is_state(const Tensor& x) {
    return x.dim() == 4;
}

TEST(GdnFusedExact, Repeats) {
    for_each_form(exact_case(), [](const GdnCase& gdn_case, const FusedVariant& variant) {
        const Tensors first = run(variant, gdn_case);
        for (int repeat = 0; repeat < 3; ++repeat) {
            expect_same_bits(first, run(variant, gdn_case));
        }
        // forward() alone, and methods of one call in another order and twice.
        expect_same_bits(run_all(*variant.make_call(gdn_case), gdn_case), first);
        const auto call = variant.make_call(gdn_case);
        (void)run_all(*call, gdn_case);
        const GdnSummary summary = call->summary();
        expect_same_bits({{"S", summary.S}, {"M", summary.M}}, first);
        expect_same_bits({{"dS", call->gradient_summary(gdn_case.d_o)}}, first);
        const GdnGradients again = call->backward(gdn_case.d_o, gdn_case.dS_end);
        expect_same_bits({{"dq", again.dq}, {"dk", again.dk}, {"dg", again.dg}}, first);
    });
}

TEST(GdnFusedExact, ThreadCounts) {
    // Many tasks; and so few that backward goes through windows of a segment (window_jobs.h), more
    // of them than it keeps.
    for (const GdnCase& gdn_case :
         {exact_case(), generated_case({{0, 1700}, 1710, 1, 2, 24, 72}, 32),
          generated_case({{0, 40, 1740}, 1740, 1, 1, 16, 32}, 33)}) {
        for_each_form(gdn_case, [](const GdnCase& typed, const FusedVariant& variant) {
            const int threads = at::get_num_threads();
            at::set_num_threads(1);
            const Tensors one = run(variant, typed);
            for (const int count : {2, 3, 5}) {
                at::set_num_threads(count);
                expect_same_bits(one, run(variant, typed));
            }
            at::set_num_threads(threads);
        });
    }
}

TEST(GdnFusedExact, StridesAndInputsUnchanged) {
    for_each_form(exact_case(), [](const GdnCase& gdn_case, const FusedVariant& variant) {
        const GdnCase views = strided(gdn_case);
        const GdnCase before = with_dtype(gdn_case, at::kDouble);
        expect_same_bits(run(variant, gdn_case), run(variant, views));
        for (const GdnCase* after : {&gdn_case, &views}) {
            const GdnInputs &x = after->inputs, &y = before.inputs;
            expect_same_bits(
                {{"q", x.q.to(at::kDouble)},
                 {"k", x.k.to(at::kDouble)},
                 {"v", x.v.to(at::kDouble)},
                 {"beta", x.beta.to(at::kDouble)},
                 {"d_o", after->d_o.to(at::kDouble)}},
                {{"q", y.q}, {"k", y.k}, {"v", y.v}, {"beta", y.beta}, {"d_o", before.d_o}});
        }
    });
}

/// Value heads of one key head, as a case of its own.
GdnCase one_key_head(const GdnCase& all, std::int64_t key_head) {
    const std::int64_t group = all.inputs.v.size(1) / all.inputs.q.size(1);
    GdnCase result = all;
    for (Tensor* x : {&result.inputs.q, &result.inputs.k}) {
        *x = x->narrow(1, key_head, 1);
    }
    for (Tensor* x : {&result.inputs.v, &result.inputs.g, &result.inputs.beta, &result.d_o,
                      &result.S_start, &result.dS_end}) {
        *x = x->narrow(1, key_head * group, group);
    }
    return result;
}

TEST(GdnFusedExact, AHeadAlone) {
    for_each_form(exact_case(), [](const GdnCase& gdn_case, const FusedVariant& variant) {
        const Tensors together = run(variant, gdn_case);
        const std::int64_t group = 3;
        for (std::int64_t head = 0; head < 2; ++head) {
            for (const auto& [name, x] : run(variant, one_key_head(gdn_case, head))) {
                const bool by_key_head = name == "dq" || name == "dk";
                const std::int64_t count = by_key_head ? 1 : group;
                EXPECT_TRUE(at::equal(x, together.at(name).narrow(1, head * count, count)))
                    << name << " of key head " << head;
            }
        }
        // A value head's outputs do not depend on those that share its key head.
        GdnCase alone = one_key_head(gdn_case, 1);
        for (Tensor* x : {&alone.inputs.v, &alone.inputs.g, &alone.inputs.beta, &alone.d_o,
                          &alone.S_start, &alone.dS_end}) {
            *x = x->narrow(1, 2, 1);
        }
        for (const auto& [name, x] : run(variant, alone)) {
            if (name != "dq" && name != "dk") {
                EXPECT_TRUE(at::equal(x, together.at(name).narrow(1, 5, 1))) << name;
            }
        }
    });
}

GdnCase one_segment(const GdnCase& all, std::size_t i) {
    const std::int64_t begin = all.offsets[i], length = all.offsets[i + 1] - begin;
    GdnCase result = all;
    for (Tensor* x : {&result.inputs.q, &result.inputs.k, &result.inputs.v, &result.inputs.g,
                      &result.inputs.beta, &result.d_o}) {
        *x = x->narrow(0, begin, length);
    }
    result.offsets = {0, length};
    for (Tensor* x : {&result.S_start, &result.dS_end}) {
        *x = x->narrow(0, static_cast<std::int64_t>(i), 1);
    }
    return result;
}

TEST(GdnFusedExact, ASegmentAlone) {
    for_each_form(exact_case(), [](const GdnCase& gdn_case, const FusedVariant& variant) {
        const Tensors together = run(variant, gdn_case);
        for (std::size_t i = 0; i + 1 < gdn_case.offsets.size(); ++i) {
            const std::int64_t begin = gdn_case.offsets[i];
            const std::int64_t length = gdn_case.offsets[i + 1] - begin;
            for (const auto& [name, x] : run(variant, one_segment(gdn_case, i))) {
                const Tensor part =
                    is_state(x) ? together.at(name).narrow(0, static_cast<std::int64_t>(i), 1)
                                : together.at(name).narrow(0, begin, length);
                EXPECT_TRUE(at::equal(x, part)) << name << " of segment " << i;
            }
        }
    });
}

TEST(GdnFusedExact, EmptySegments) {
    for_each_form(exact_case(), [](const GdnCase& gdn_case, const FusedVariant& variant) {
        const Tensors actual = run(variant, gdn_case);
        for (const std::int64_t empty : {0, 2}) {
            EXPECT_TRUE(at::equal(actual.at("S_end")[empty], gdn_case.S_start[empty]));
            EXPECT_TRUE(at::equal(actual.at("dS_start")[empty], gdn_case.dS_end[empty]));
            EXPECT_TRUE(at::equal(actual.at("M")[empty], at::eye(40).expand({6, 40, 40})));
            EXPECT_EQ(actual.at("S")[empty].count_nonzero().item<std::int64_t>(), 0);
            EXPECT_EQ(actual.at("dS")[empty].count_nonzero().item<std::int64_t>(), 0);
        }
    });
}

/// Outside of value head 4 (key head 1) in segment 1, nothing may change.
void expect_contained(const GdnCase& gdn_case, const Tensors& clean, const Tensors& dirty) {
    const std::int64_t segment = 1;
    const std::int64_t begin = gdn_case.offsets[1], end = gdn_case.offsets[2];
    for (const auto& [name, x] : clean) {
        const bool by_key_head = name == "dq" || name == "dk";
        Tensor changed = x != dirty.at(name);  // NaN differs from all
        const std::int64_t from = is_state(x) ? segment : begin;
        const std::int64_t count = is_state(x) ? 1 : end - begin;
        changed.narrow(0, from, count).select(1, by_key_head ? 1 : 4).fill_(false);
        EXPECT_FALSE(changed.any().item<bool>()) << name;
    }
}

TEST(GdnFusedExact, NanStaysInItsHeadAndSegment) {
    const std::vector<std::function<Tensor&(GdnCase&)>> by_value_head = {
        [](GdnCase& c) -> Tensor& { return c.inputs.v; },
        [](GdnCase& c) -> Tensor& { return c.inputs.g; },
        [](GdnCase& c) -> Tensor& { return c.inputs.beta; },
        [](GdnCase& c) -> Tensor& { return c.d_o; }};
    for_each_form(exact_case(), [&](const GdnCase& gdn_case, const FusedVariant& variant) {
        const Tensors clean = run(variant, gdn_case);
        for (std::size_t i = 0; i < by_value_head.size(); ++i) {
            SCOPED_TRACE(i);
            GdnCase bad = gdn_case;
            Tensor& x = by_value_head[i](bad);
            x = x.clone();
            x[69][4].fill_(std::numeric_limits<float>::quiet_NaN());  // next to the next segment
            const Tensors dirty = run(variant, bad);
            expect_contained(gdn_case, clean, dirty);
            const Tensor hit = i == 3 ? dirty.at("dv") : dirty.at("o");
            EXPECT_TRUE(hit.select(1, 4).isnan().any().item<bool>());
        }
    });
}

TEST(GdnFusedExact, NanInAStateStaysInItsHeadAndSegment) {
    for_each_form(exact_case(), [&](const GdnCase& gdn_case, const FusedVariant& variant) {
        const Tensors clean = run(variant, gdn_case);
        for (const bool is_start : {true, false}) {
            GdnCase bad = gdn_case;
            Tensor& x = is_start ? bad.S_start : bad.dS_end;
            x = x.clone();
            x[1][4].fill_(std::numeric_limits<float>::quiet_NaN());
            expect_contained(gdn_case, clean, run(variant, bad));
        }
    });
}

/// The message of the UsageError that `make` throws, or nothing.
std::string refusal(const std::function<void()>& make) {
    try {
        make();
    } catch (const UsageError& error) {
        return error.what();
    }
    return "";
}

std::string refusal_of(const GdnCase& c) {
    return refusal(
        [&] { (void)make_gdn_call(GdnBackend::kFused, c.inputs, c.offsets, c.options); });
}

void expect_names(const std::string& text, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) {
        EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
    }
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
}

TEST(GdnFusedExact, RefusalsNameTheLimit) {
    expect_names(refusal_of(with_dtype(generated_case({{0, 9}, 9, 1, 1, 8, 8}, 1), at::kDouble)),
                 {"fused", "Double", "float", "bfloat16"});
    expect_names(refusal_of(generated_case({{0, 9}, 9, 1, 1, 257, 8}, 1)), {"256", "257"});
    expect_names(refusal_of(generated_case({{0, 9}, 9, 1, 1, 8, 257}, 1)), {"256", "257"});
    expect_names(refusal_of(generated_case({{0, 9}, 9, 1, 65, 8, 8}, 1)), {"64", "65"});
    GdnCase meta = generated_case({{0, 9}, 9, 1, 1, 8, 8}, 1);
    for (Tensor* x :
         {&meta.inputs.q, &meta.inputs.k, &meta.inputs.v, &meta.inputs.g, &meta.inputs.beta}) {
        *x = x->to(at::kMeta);
    }
    expect_names(refusal_of(meta), {"cpu", "meta", "eager"});
    GdnCase share = generated_case({{0, 9}, 9, 1, 1, 8, 8}, 1);
    for (const double wrong : {-0.1, 1.5, std::nan("")}) {
        share.options.kept_share = wrong;
        expect_names(refusal_of(share), {"kept_share", "[0, 1]"});
    }
}

TEST(GdnFusedExact, RefusesMethodsThatDoNotFit) {
    const GdnCase c = generated_case({{0, 20}, 20, 2, 4, 16, 8}, 17);
    const auto call = make_gdn_call(GdnBackend::kFused, c.inputs, c.offsets, c.options);
    EXPECT_THROW((void)call->backward(c.d_o, c.dS_end), Error);  // no forward() yet
    EXPECT_THROW((void)call->forward(c.S_start.narrow(1, 0, 2)), UsageError);
    (void)call->forward(c.S_start);
    EXPECT_THROW((void)call->backward(c.d_o.narrow(0, 0, 5), c.dS_end), UsageError);
    EXPECT_THROW((void)call->backward(c.d_o, c.dS_end.mT()), UsageError);
    EXPECT_THROW((void)call->gradient_summary(c.d_o.narrow(0, 0, 5)), UsageError);
}

TEST(GdnFusedExact, OutputsHaveTheDtypesOfTheirInputs) {
    GdnCase c = with_dtype(generated_case({{0, 20}, 20, 1, 2, 16, 16}, 16), at::kBFloat16);
    c.inputs.g = c.inputs.g.to(at::kDouble);
    c.inputs.beta = c.inputs.beta.to(at::kFloat);
    for (const FusedVariant& variant : fused_bf16_variants()) {
        for (const auto& [name, x] : run_all(*variant.make_call(c), c)) {
            const bool narrow = name == "o" || name == "dq" || name == "dk" || name == "dv";
            const at::ScalarType rest = name == "dg" ? at::kDouble : at::kFloat;
            EXPECT_EQ(x.scalar_type(), narrow ? at::kBFloat16 : rest) << name;
        }
    }
}

TEST(GdnFusedExact, AnUnavailableInstructionSetIsRefused) {
    for (const Isa isa :
         {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmxBf16}) {
        const std::string text = refusal([&] { const ForcedIsa forced(isa); });
        if (isa_available(isa)) {
            EXPECT_EQ(text, "");
            continue;
        }
        expect_names(text, {isa_name(isa)});
        for (const Isa other : available_isas()) {
            expect_names(text, {isa_name(other)});
        }
    }
    expect_names(refusal([] { (void)parse_isa("bogus"); }), {"bogus", "portable"});
}

}  // namespace
}  // namespace hybridcp::test
