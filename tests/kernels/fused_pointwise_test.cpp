// The fused pointwise kernels on every instruction set of this machine, and plain ATen beside them,
// against fp64 formulas; then what holds for bits: threads, repeats, place of a row or a channel.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "kernels/comparison.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/pointwise_cases.h"

namespace hybridcp {
namespace {

using namespace testing;

/// The same values as a slice of something wider, at an odd address.
at::Tensor as_slice(const at::Tensor& x) {
    at::Tensor wide = at::full({x.size(0), x.size(1) + 5}, 1e30, x.options());
    wide.narrow(1, 3, x.size(1)).copy_(x);
    return wide.narrow(1, 3, x.size(1));
}

Tensors inputs_of(const Case& c, at::ScalarType dtype, bool sliced) {
    Tensors inputs;
    for (const at::Tensor& value : c.values) {
        const at::Tensor x = value.to(dtype);
        const bool is_rows = x.dim() == 2 && x.size(0) == c.values[0].size(0);
        inputs.push_back(
            (sliced && is_rows ? as_slice(x) : x.clone()).detach().requires_grad_(true));
    }
    return inputs;
}

/// Output, then the gradients of all inputs.
Tensors run(const Op& op, const Tensors& inputs, at::ScalarType dtype) {
    Tensors results{op(inputs)};
    const bool is_loss = results[0].dim() == 0;
    const at::Tensor d =
        (is_loss ? at::full({}, 0.75, at::kDouble) : random_normal(results[0].sizes(), 11, dtype))
            .to(results[0].scalar_type());
    for (const at::Tensor& gradient : gradients_of(results[0], d, inputs)) {
        results.push_back(gradient);
    }
    return results;
}

/// Runs body() on each instruction set, then with ATen's operators.
void for_each_version(const std::function<void()>& body) {
    for (const Isa isa : available_isas()) {
        SCOPED_TRACE(isa_name(isa));
        const ForcedIsa forced(isa);
        body();
    }
    SCOPED_TRACE("eager");
    const ForcedPointwise forced(PointwiseBackend::kEager);
    body();
}

void expect_equals_formula(const Case& c, at::ScalarType dtype, bool sliced) {
    const Tensors inputs = inputs_of(c, dtype, sliced);
    Tensors wide;
    for (const at::Tensor& input : inputs) {
        wide.push_back(leaf(input.to(at::kDouble)));
    }
    const Tensors expected = run(c.formula, wide, dtype);
    for_each_version([&] {
        const Tensors results = run(c.op, inputs, dtype);
        for (std::size_t i = 0; i < results.size(); ++i) {
            const double fp32_bar = i == 0 ? kOutputBar : kGradientBar;
            EXPECT_LE(relative_l2(results[i], expected[i]),
                      dtype == at::kBFloat16 ? kBf16Bar : fp32_bar)
                << (i == 0 ? "output" : "gradient ") << i;
        }
    });
}

void expect_same_bits(const Tensors& a, const Tensors& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
        EXPECT_TRUE(at::equal(a[i], b[i])) << "result " << i;
    }
}

TEST(FusedPointwise, EveryIsaEqualsTheDefinition) {
    const std::vector<std::pair<std::int64_t, std::int64_t>> shapes{
        {0, 3},  {0, 65}, {1, 3},   {1, 63}, {1, 65},  {1, 1031}, {3, 3},    {3, 63},
        {3, 65}, {63, 3}, {63, 65}, {65, 3}, {65, 63}, {65, 65},  {5, 1031}, {600, 65}};
    for (const auto& [rows, width] : shapes) {
        for (const Case& c : pointwise_cases(rows, width)) {
            for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
                for (const bool sliced : {false, true}) {
                    SCOPED_TRACE(fmt::format("{} {}x{} {} {}", c.name, rows, width,
                                             at::toString(dtype), sliced ? "sliced" : ""));
                    expect_equals_formula(c, dtype, sliced);
                }
            }
        }
    }
}

TEST(FusedPointwise, ThreadsAndRepeatsDoNotChangeABit) {
    const int threads = at::get_num_threads();
    for (const Isa isa : available_isas()) {
        const ForcedIsa forced(isa);
        for (const Case& c : pointwise_cases(1100, 130)) {
            for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
                SCOPED_TRACE(fmt::format("{} {} {}", c.name, isa_name(isa), at::toString(dtype)));
                const Tensors inputs = inputs_of(c, dtype, false);
                at::set_num_threads(1);
                const Tensors one = run(c.op, inputs, dtype);
                at::set_num_threads(2);
                expect_same_bits(run(c.op, inputs, dtype), one);
                at::set_num_threads(3);
                expect_same_bits(run(c.op, inputs, dtype), one);
            }
        }
    }
    at::set_num_threads(threads);
}

/// A row alone, at another address, has the bits that it has among others.
TEST(FusedPointwise, ARowDoesNotKnowItsPlace) {
    for (const Isa isa : available_isas()) {
        const ForcedIsa forced(isa);
        for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
            const at::Tensor x = random_normal({300, 131}, 1, dtype);
            const at::Tensor z = random_normal({300, 131}, 2, dtype);
            const at::Tensor weight = random_normal({131}, 3, dtype);
            const auto results = [&](std::int64_t row, std::int64_t count) {
                const Tensors in{leaf(x.narrow(0, row, count)), leaf(z.narrow(0, row, count))};
                const Tensors outputs{rms_norm_zero_centered(in[0], weight, kEps),
                                      rms_norm_gated(in[0], in[1], weight, kEps),
                                      activate(in[0], in[1])};
                Tensors all = outputs;
                for (const at::Tensor& y : outputs) {
                    all.push_back(gradients_of(y, z.narrow(0, row, count), {in[0]})[0]);
                }
                return all;
            };
            const Tensors whole = results(0, 300);
            for (const std::int64_t row : {0, 17, 299}) {
                Tensors rows;
                for (const at::Tensor& result : whole) {
                    rows.push_back(result.narrow(0, row, 1));
                }
                expect_same_bits(results(row, 1), rows);
            }
        }
    }
}

/// Channels may be split over ranks: one has the same bits in a full vector and in the last one.
TEST(FusedPointwise, AChannelDoesNotKnowItsPlace) {
    for (const Isa isa : available_isas()) {
        const ForcedIsa forced(isa);
        for (const Case& c :
             {conv_case(270, 64, 4), conv_case(270, 64, 3), activation_case(270, 64)}) {
            for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
                SCOPED_TRACE(fmt::format("{} {}", c.name, isa_name(isa)));
                const auto part = [&](std::int64_t begin, std::int64_t count) {
                    Tensors inputs;
                    for (const at::Tensor& value : c.values) {
                        const std::int64_t dim = value.size(-1) == 64 ? value.dim() - 1 : 0;
                        inputs.push_back(leaf(value.to(dtype).narrow(dim, begin, count)));
                    }
                    const at::Tensor y = c.op(inputs);
                    const at::Tensor d = random_normal({270, 64}, 11, dtype);
                    Tensors all{y};
                    for (const at::Tensor& gradient :
                         gradients_of(y, d.narrow(1, begin, count), inputs)) {
                        all.push_back(gradient);
                    }
                    return all;
                };
                const Tensors whole = part(0, 64), some = part(29, 5);
                for (std::size_t i = 0; i < whole.size(); ++i) {
                    const std::int64_t dim = whole[i].size(-1) == 64 ? whole[i].dim() - 1 : 0;
                    EXPECT_TRUE(at::equal(whole[i].narrow(dim, 29, 5), some[i])) << i;
                }
            }
        }
    }
}

TEST(FusedPointwise, NaNStaysInItsRowAndChannel) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (const Isa isa : available_isas()) {
        const ForcedIsa forced(isa);
        for (const Case& c : pointwise_cases(65, 35)) {
            SCOPED_TRACE(fmt::format("{} {}", c.name, isa_name(isa)));
            const bool per_channel = c.name.starts_with("conv");
            Case broken = c;
            broken.values[0] = c.values[0].clone();
            broken.values[0][20][33] = nan;
            for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
                const Tensors clean = run(c.op, inputs_of(c, dtype, false), dtype);
                const Tensors dirty = run(c.op, inputs_of(broken, dtype, false), dtype);
                const at::Tensor dx = dirty[1], clean_dx = clean[1];
                EXPECT_TRUE(c.name == "rotary" || dx[20][33].isnan().item<bool>());
                const auto same = [&](std::int64_t dim, std::int64_t begin, std::int64_t end) {
                    return at::equal(dx.slice(dim, begin, end), clean_dx.slice(dim, begin, end));
                };
                EXPECT_TRUE(same(0, 0, per_channel ? 17 : 20) &&
                            same(0, per_channel ? 24 : 21, 65));
                if (per_channel) {
                    EXPECT_TRUE(same(1, 0, 33) && same(1, 34, 35));
                    EXPECT_TRUE(at::equal(dirty[2].slice(0, 0, 33), clean[2].slice(0, 0, 33)));
                }
            }
        }
    }
}

TEST(FusedPointwise, AppliesToFp32AndBf16OnTheCpu) {
    const at::Tensor x = at::zeros({2, 3});
    EXPECT_TRUE(takes_fused({x}));
    EXPECT_TRUE(takes_fused({x.to(at::kBFloat16)}));
    EXPECT_FALSE(takes_fused({x.to(at::kDouble)}));
    EXPECT_FALSE(takes_fused({x, x.to(at::kBFloat16)}));
    EXPECT_FALSE(takes_fused({at::empty({2, 3}, at::TensorOptions().device(at::kMeta))}));
    const ForcedPointwise eager(PointwiseBackend::kEager);
    EXPECT_FALSE(takes_fused({x}));
    {
        const ForcedPointwise fused(PointwiseBackend::kFused);
        EXPECT_TRUE(takes_fused({x}));
    }
    EXPECT_FALSE(takes_fused({x}));
}

}  // namespace
}  // namespace hybridcp
