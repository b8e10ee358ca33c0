#include "kernels/conv/causal_conv.h"

#include <gtest/gtest.h>

#include <numeric>

#include "hybridcp/error.h"
#include "kernels/comparison.h"

namespace hybridcp {
namespace {

using namespace testing;

/// The definition, token by token: the history of a segment's first tokens is its halo or zero.
at::Tensor naive_conv(const at::Tensor& x,
                      const at::Tensor& weight,
                      const at::Tensor& halo,
                      const std::vector<std::int64_t>& offsets) {
    const std::int64_t width = weight.size(1);
    const std::vector<at::Tensor> tokens = x.unbind(0), taps = weight.unbind(1);
    std::vector<at::Tensor> rows;
    for (std::size_t segment = 0; segment + 1 < offsets.size(); ++segment) {
        for (std::int64_t t = offsets[segment]; t < offsets[segment + 1]; ++t) {
            at::Tensor sum = at::zeros({x.size(1)}, x.options());
            for (std::int64_t j = 0; j < width; ++j) {
                const std::int64_t source = t - width + 1 + j;
                if (source >= offsets[segment]) {
                    sum = sum + taps[static_cast<std::size_t>(j)] *
                                    tokens[static_cast<std::size_t>(source)];
                } else if (halo.defined()) {
                    const std::int64_t row = width - 1 + source - offsets[segment];
                    sum = sum + taps[static_cast<std::size_t>(j)] *
                                    halo[static_cast<std::int64_t>(segment)][row];
                }
            }
            rows.push_back(at::silu(sum));
        }
    }
    while (static_cast<std::int64_t>(rows.size()) < x.size(0)) {
        rows.push_back(at::zeros({x.size(1)}, x.options()));
    }
    return rows.empty() ? x * 0 : at::stack(rows);
}

struct Case {
    std::string name;
    std::int64_t num_tokens, channels, width;
    std::vector<std::int64_t> offsets;
};

const std::vector<Case>& cases() {
    static const std::vector<Case> all{
        {"no_tokens", 0, 6, 4, {0, 0}},
        {"no_segments", 3, 6, 4, {0}},
        {"one", 1, 6, 4, {0, 1}},
        {"two", 2, 6, 4, {0, 2}},
        {"three", 3, 6, 4, {0, 3}},
        {"t63", 63, 7, 4, {0, 63}},
        {"t65", 65, 7, 4, {0, 65}},
        {"padding_behind", 9, 6, 4, {0, 5}},
        {"packed", 65, 6, 4, {0, 0, 1, 3, 6, 6, 10, 50, 51, 63, 65, 65}},
        {"packed_padding", 20, 6, 4, {0, 2, 3, 3, 17}},
        {"all_empty", 2, 6, 4, {0, 0, 0}},
        {"width_1", 5, 6, 1, {0, 2, 5}},
        {"width_2", 5, 6, 2, {0, 1, 5}},
        {"several_blocks", 40, 9000, 4, {0, 17, 40}},
    };
    return all;
}

void expect_equals_definition(const Case& c, bool with_halo, at::ScalarType dtype) {
    SCOPED_TRACE(c.name + (with_halo ? " with halo " : " ") + at::toString(dtype));
    const double output_bar = dtype == at::kBFloat16 ? kBf16Bar : kOutputBar;
    const double gradient_bar = dtype == at::kBFloat16 ? kBf16Bar : kGradientBar;
    const auto num_segments = static_cast<std::int64_t>(c.offsets.size()) - 1;
    std::vector<at::Tensor> inputs{
        leaf(random_normal({c.num_tokens, c.channels}, 1, dtype)),
        leaf(random_normal({c.channels, c.width}, 2, dtype)),
    };
    if (with_halo) {
        inputs.push_back(leaf(random_normal({num_segments, c.width - 1, c.channels}, 3, dtype)));
    }
    const at::Tensor dy = random_normal({c.num_tokens, c.channels}, 4, dtype);
    std::vector<at::Tensor> wide;
    for (const at::Tensor& input : inputs) {
        wide.push_back(leaf(input.to(at::kDouble)));
    }
    const at::Tensor none;
    const at::Tensor y =
        causal_conv_silu(inputs[0], inputs[1], with_halo ? inputs[2] : none, c.offsets);
    const at::Tensor reference =
        naive_conv(wide[0], wide[1], with_halo ? wide[2] : none, c.offsets);
    EXPECT_EQ(y.scalar_type(), dtype);
    EXPECT_LE(relative_l2(y, reference), output_bar);
    const auto gradients = gradients_of(y, dy, inputs);
    // A sum that holds every input, so that one with no token in a window has a zero gradient, not
    // none.
    at::Tensor with_all = (reference * dy.to(at::kDouble)).sum();
    for (const at::Tensor& input : wide) {
        with_all = with_all + (input * 0).sum();
    }
    const auto expected = gradients_of(with_all, at::ones({}, at::kDouble), wide);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        EXPECT_EQ(gradients[i].scalar_type(), dtype);
        EXPECT_LE(relative_l2(gradients[i], expected[i]), gradient_bar) << "input " << i;
    }
    const std::int64_t padding = c.num_tokens - c.offsets.back();
    EXPECT_EQ(y.narrow(0, c.offsets.back(), padding).count_nonzero().item<std::int64_t>(), 0);
    EXPECT_EQ(
        gradients[0].narrow(0, c.offsets.back(), padding).count_nonzero().item<std::int64_t>(), 0);
}

TEST(Conv, EqualsTheDefinition) {
    for (const Case& c : cases()) {
        for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
            expect_equals_definition(c, false, dtype);
            expect_equals_definition(c, true, dtype);
        }
    }
}

TEST(Conv, Golden) {
    for (const std::string name : {"b2", "t1", "t2", "t3", "varlen", "halo", "halo_t1"}) {
        const SafetensorsFile file = open_golden("conv1d/" + name);
        for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
            SCOPED_TRACE(name + " " + at::toString(dtype));
            const std::int64_t rows = file.read("x").size(0), length = file.read("x").size(1);
            std::vector<std::int64_t> offsets{0};
            if (file.contains("cu_seqlens")) {
                const at::Tensor cuts = file.read("cu_seqlens").to(at::kLong);
                offsets.assign(cuts.data_ptr<std::int64_t>(),
                               cuts.data_ptr<std::int64_t>() + cuts.numel());
            } else {
                for (std::int64_t row = 0; row < rows; ++row) {
                    offsets.push_back((row + 1) * length);
                }
            }
            std::vector<std::string> names{"x", "weight"};
            std::vector<at::Tensor> inputs{leaf(file.read("x").flatten(0, 1).to(dtype)),
                                           leaf(file.read("weight").to(dtype))};
            if (file.contains("halo")) {
                names.emplace_back("halo");
                inputs.push_back(leaf(file.read("halo").to(dtype)));
            }
            const at::Tensor y = causal_conv_silu(
                inputs[0], inputs[1], inputs.size() == 3 ? inputs[2] : at::Tensor(), offsets);
            const bool wide = dtype == at::kFloat;
            EXPECT_LE(relative_l2(y, file.read("y").flatten(0, 1)), wide ? kOutputBar : kBf16Bar);
            const auto gradients = gradients_of(y, file.read("dy").flatten(0, 1).to(dtype), inputs);
            for (std::size_t i = 0; i < names.size(); ++i) {
                const at::Tensor expected = file.read("d" + names[i]).reshape(gradients[i].sizes());
                EXPECT_LE(relative_l2(gradients[i], expected), wide ? kGradientBar : kBf16Bar)
                    << names[i];
            }
        }
    }
}

TEST(Conv, GradientsByDifferences) {
    const std::vector<at::Tensor> inputs{random_normal({11, 3}, 1), random_normal({3, 4}, 2),
                                         random_normal({4, 3, 3}, 3)};
    expect_gradients_by_differences(
        [](const std::vector<at::Tensor>& x) {
            return causal_conv_silu(x[0], x[1], x[2], {0, 1, 1, 8, 10});
        },
        inputs);
    expect_gradients_by_differences(
        [](const std::vector<at::Tensor>& x) {
            return causal_conv_silu(x[0], x[1], x[2].narrow(0, 0, 1), {0, 11});
        },
        inputs);
}

TEST(Conv, NothingCrossesABoundary) {
    const std::vector<std::int64_t> offsets{0, 5, 9};
    const at::Tensor x = random_normal({9, 6}, 1, at::kFloat),
                     weight = random_normal({6, 4}, 2, at::kFloat);
    const at::Tensor before = causal_conv_silu(x, weight, at::Tensor(), offsets);
    at::Tensor changed = x.clone();
    changed.narrow(0, 0, 5).fill_(1e6);
    const at::Tensor after = causal_conv_silu(changed, weight, at::Tensor(), offsets);
    EXPECT_TRUE(before.narrow(0, 5, 4).equal(after.narrow(0, 5, 4)));
}

/// One document cut anywhere, with the rows before the cut as halo, has the same bits as the
/// document.
TEST(Conv, AHaloContinuesTheDocument) {
    const at::Tensor x = random_normal({40, 6}, 1, at::kFloat),
                     weight = random_normal({6, 4}, 2, at::kFloat);
    const at::Tensor whole = causal_conv_silu(x, weight, at::Tensor(), {0, 40});
    for (const std::int64_t cut : {3, 4, 17, 39}) {
        const at::Tensor halo = x.narrow(0, cut - 3, 3).unsqueeze(0);
        const at::Tensor part =
            causal_conv_silu(x.narrow(0, cut, 40 - cut), weight, halo, {0, 40 - cut});
        EXPECT_TRUE(part.equal(whole.narrow(0, cut, 40 - cut))) << cut;
    }
}

TEST(Conv, RefusesWhatDoesNotFit) {
    const at::Tensor x = at::zeros({5, 6}), weight = at::zeros({6, 4}), none;
    EXPECT_THROW((void)causal_conv_silu(x, at::zeros({5, 4}), none, {0, 5}), UsageError);
    EXPECT_THROW((void)causal_conv_silu(x, weight, none, {}), UsageError);
    EXPECT_THROW((void)causal_conv_silu(x, weight, none, {1, 5}), UsageError);
    EXPECT_THROW((void)causal_conv_silu(x, weight, none, {0, 3, 2}), UsageError);
    EXPECT_THROW((void)causal_conv_silu(x, weight, none, {0, 6}), UsageError);
    EXPECT_THROW((void)causal_conv_silu(x, weight, at::zeros({2, 3, 6}), {0, 5}), UsageError);
    EXPECT_THROW((void)causal_conv_silu(x, weight, at::zeros({1, 4, 6}), {0, 5}), UsageError);
}

}  // namespace
}  // namespace hybridcp
