#include "kernels/rotary/rotary.h"

#include <gtest/gtest.h>

#include <cmath>

#include "hybridcp/error.h"
#include "kernels/comparison.h"

namespace hybridcp {
namespace {

using namespace testing;

/// The definition, number by number in fp64, from the fp32 angle.
at::Tensor naive_rotary(const at::Tensor& x,
                        const std::vector<std::int64_t>& positions,
                        std::int64_t r,
                        double theta) {
    at::Tensor y = x.to(at::kDouble).clone();
    auto values = y.accessor<double, 3>();
    for (std::int64_t t = 0; t < x.size(0); ++t) {
        for (std::int64_t i = 0; i < r / 2; ++i) {
            const float exponent = static_cast<float>(2 * i) / static_cast<float>(r);
            const float inv_freq =
                1.0F / static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
            const float angle =
                static_cast<float>(positions[static_cast<std::size_t>(t)]) * inv_freq;
            const double c = std::cos(static_cast<double>(angle)),
                         s = std::sin(static_cast<double>(angle));
            for (std::int64_t head = 0; head < x.size(1); ++head) {
                const double a = values[t][head][i], b = values[t][head][i + r / 2];
                values[t][head][i] = a * c - b * s;
                values[t][head][i + r / 2] = b * c + a * s;
            }
        }
    }
    return y;
}

TEST(Rotary, Golden) {
    const std::vector<std::pair<std::string, double>> cases{
        {"d32", 1e7}, {"d64_packed", 1e4}, {"d256_far", 1e7}};
    for (const auto& [name, theta] : cases) {
        SCOPED_TRACE(name);
        const SafetensorsFile file = open_golden("rope_partial/" + name);
        const at::Tensor cos = file.read("cos").flatten(0, 1);
        const RotaryTables tables =
            make_rotary_tables(file.read("position_ids").flatten(), cos.size(1), theta, at::kFloat);
        EXPECT_LE((tables.cos - cos).abs().max().item<double>(), 1.2e-7);
        EXPECT_LE((tables.sin - file.read("sin").flatten(0, 1)).abs().max().item<double>(), 1.2e-7);
        for (const std::string input : {"q", "k"}) {
            const at::Tensor x = leaf(file.read(input).flatten(0, 1));
            const at::Tensor y = apply_partial_rotary(x, tables);
            EXPECT_LE(relative_l2(y, file.read(input + "_rot").flatten(0, 1)), kOutputBar) << input;
            const at::Tensor dy = file.read("d" + input + "_rot").flatten(0, 1);
            const at::Tensor dx = gradients_of(y, dy, {x})[0];
            EXPECT_LE(relative_l2(dx, file.read("d" + input).flatten(0, 1)), kGradientBar) << input;
        }
    }
}

TEST(Rotary, EqualsTheDefinition) {
    const std::vector<std::int64_t> positions{0, 1, 2, 63, 65, 0, 4097, 262143};
    const at::Tensor position_ids = at::tensor(positions, at::kLong);
    for (const auto& [rotary_dim, head_dim] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {2, 2}, {4, 16}, {6, 7}, {20, 80}, {0, 5}}) {
        for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
            SCOPED_TRACE(fmt::format("{} of {} {}", rotary_dim, head_dim, at::toString(dtype)));
            const at::Tensor x = random_normal({8, 3, head_dim}, 1, dtype);
            const RotaryTables tables = make_rotary_tables(position_ids, rotary_dim, 1e4, dtype);
            EXPECT_EQ(tables.cos.scalar_type(), dtype);
            const at::Tensor y = apply_partial_rotary(x, tables);
            EXPECT_EQ(y.scalar_type(), dtype);
            const double bar = dtype == at::kDouble  ? 1e-14
                               : dtype == at::kFloat ? kOutputBar
                                                     : kBf16Bar;
            EXPECT_LE(relative_l2(y, naive_rotary(x, positions, rotary_dim, 1e4)), bar);
            EXPECT_TRUE(y.narrow(2, rotary_dim, head_dim - rotary_dim)
                            .equal(x.narrow(2, rotary_dim, head_dim - rotary_dim)));
        }
    }
}

/// bf16: tables rounded to bf16 before use, one rounding of the result.
TEST(Rotary, Bf16RoundsTheTablesAndThenTheResult) {
    const at::Tensor positions = at::arange(9);
    const RotaryTables tables = make_rotary_tables(positions, 4, 1e4, at::kBFloat16);
    const RotaryTables wide = make_rotary_tables(positions, 4, 1e4, at::kFloat);
    EXPECT_TRUE(tables.cos.equal(wide.cos.to(at::kBFloat16)));
    EXPECT_TRUE(tables.sin.equal(wide.sin.to(at::kBFloat16)));
    const at::Tensor x = random_normal({9, 2, 8}, 1, at::kBFloat16);
    const RotaryTables widened{tables.cos.to(at::kFloat), tables.sin.to(at::kFloat)};
    const at::Tensor expected = apply_partial_rotary(x.to(at::kFloat), widened).to(at::kBFloat16);
    EXPECT_TRUE(apply_partial_rotary(x, tables).equal(expected));
}

TEST(Rotary, GradientsByDifferences) {
    const RotaryTables tables = make_rotary_tables(at::arange(5) * 3, 4, 1e4, at::kDouble);
    expect_gradients_by_differences(
        [&](const auto& x) { return apply_partial_rotary(x[0], tables); },
        {random_normal({5, 2, 6}, 1)});
}

TEST(Rotary, NoTokensAndStridedInputs) {
    const RotaryTables none = make_rotary_tables(at::arange(0), 4, 1e4, at::kFloat);
    EXPECT_EQ(apply_partial_rotary(at::zeros({0, 2, 8}), none).size(0), 0);
    const RotaryTables tables = make_rotary_tables(at::arange(4), 4, 1e4, at::kFloat);
    const at::Tensor both = random_normal({4, 2, 16}, 1, at::kFloat), copy = both.clone();
    const at::Tensor x = both.narrow(2, 0, 8);
    EXPECT_TRUE(
        apply_partial_rotary(x, tables).equal(apply_partial_rotary(x.contiguous(), tables)));
    EXPECT_TRUE(both.equal(copy));
}

TEST(Rotary, RefusesWhatDoesNotFit) {
    EXPECT_THROW((void)make_rotary_tables(at::arange(4), 3, 1e4, at::kFloat), UsageError);
    EXPECT_THROW((void)make_rotary_tables(at::zeros({4}), 4, 1e4, at::kFloat), UsageError);
    const RotaryTables tables = make_rotary_tables(at::arange(4), 4, 1e4, at::kFloat);
    EXPECT_THROW((void)apply_partial_rotary(at::zeros({5, 2, 8}), tables), UsageError);
    EXPECT_THROW((void)apply_partial_rotary(at::zeros({4, 2, 3}), tables), UsageError);
}

}  // namespace
}  // namespace hybridcp
