#include "kernels/mlp/swiglu.h"

#include <gtest/gtest.h>

#include "hybridcp/error.h"
#include "kernels/comparison.h"

namespace hybridcp {
namespace {

using namespace testing;

/// y in fp64: one sum per number, over explicit products.
at::Tensor formula(const std::vector<at::Tensor>& t) {
    const at::Tensor a = (t[0].unsqueeze(1) * t[1]).sum(2), b = (t[0].unsqueeze(1) * t[2]).sum(2);
    return ((a * a.sigmoid() * b).unsqueeze(1) * t[3]).sum(2);
}

at::Tensor kernel(const std::vector<at::Tensor>& t) {
    return swiglu(t[0], t[1], t[2], t[3]);
}

TEST(Mlp, Golden) {
    const SafetensorsFile file = open_golden("swiglu_mlp/d32_f48");
    const std::vector<std::string> names{"x", "gate", "up", "down"};
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        const bool wide = dtype == at::kFloat;
        std::vector<at::Tensor> inputs;
        for (const std::string& name : names) {
            inputs.push_back(leaf(file.read(name).to(dtype)));
        }
        const at::Tensor y = kernel(inputs);
        EXPECT_LE(relative_l2(y, file.read("y")), wide ? kOutputBar : kBf16Bar);
        const auto gradients = gradients_of(y, file.read("dy").to(dtype), inputs);
        for (std::size_t i = 0; i < names.size(); ++i) {
            EXPECT_LE(relative_l2(gradients[i], file.read("d" + names[i])),
                      wide ? kGradientBar : kBf16Bar)
                << names[i];
        }
    }
}

TEST(Mlp, EqualsTheDefinition) {
    for (const std::int64_t num_tokens : {0, 1, 2, 3, 63, 65}) {
        SCOPED_TRACE(num_tokens);
        std::vector<at::Tensor> inputs, wide;
        for (const at::Tensor& value : {random_normal({num_tokens, 7}, 1), random_normal({9, 7}, 2),
                                        random_normal({9, 7}, 3), random_normal({7, 9}, 4)}) {
            inputs.push_back(leaf(value.to(at::kFloat)));
            wide.push_back(leaf(value.to(at::kFloat).to(at::kDouble)));
        }
        const at::Tensor y = kernel(inputs), reference = formula(wide);
        const at::Tensor dy = random_normal(y.sizes(), 5, at::kFloat);
        EXPECT_LE(relative_l2(y, reference), kOutputBar);
        const auto gradients = gradients_of(y, dy, inputs);
        const auto expected = gradients_of(reference, dy.to(at::kDouble), wide);
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            EXPECT_LE(relative_l2(gradients[i], expected[i]), kGradientBar) << i;
        }
    }
}

TEST(Mlp, GradientsByDifferences) {
    expect_gradients_by_differences(kernel, {random_normal({3, 4}, 1), random_normal({5, 4}, 2),
                                             random_normal({5, 4}, 3), random_normal({4, 5}, 4)});
}

TEST(Mlp, RefusesWhatDoesNotFit) {
    const at::Tensor x = at::zeros({3, 4}), gate = at::zeros({5, 4}), down = at::zeros({4, 5});
    EXPECT_THROW((void)swiglu(x, gate, at::zeros({6, 4}), down), UsageError);
    EXPECT_THROW((void)swiglu(x, gate, gate, at::zeros({5, 4})), UsageError);
    EXPECT_THROW((void)swiglu(at::zeros({3, 5}), gate, gate, down), UsageError);
}

}  // namespace
}  // namespace hybridcp
