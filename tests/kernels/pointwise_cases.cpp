#include "kernels/pointwise_cases.h"

#include "kernels/comparison.h"
#include "kernels/conv/causal_conv.h"
#include "kernels/loss/cross_entropy.h"
#include "kernels/mlp/activation.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/rotary/rotary.h"

namespace hybridcp::testing {
namespace {

struct Activation : torch::autograd::Function<Activation> {
    static at::Tensor forward(torch::autograd::AutogradContext* context,
                              const at::Tensor& gate,
                              const at::Tensor& up) {
        context->save_for_backward({gate, up});
        return swiglu_activation(gate, up);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list upstream) {
        const auto saved = context->get_saved_variables();
        const at::Tensor without =
            swiglu_activation_backward(upstream[0].clone(), saved[0], saved[1], false).d_gate;
        const SwigluGradients result =
            swiglu_activation_backward(upstream[0].clone(), saved[0], saved[1], true);
        EXPECT_TRUE(at::equal(without.nan_to_num(), result.d_gate.nan_to_num()));
        EXPECT_TRUE(at::equal(result.activated.nan_to_num(),
                              swiglu_activation(saved[0], saved[1]).nan_to_num()));
        return {result.d_gate, result.d_up};
    }
};

at::Tensor silu_of(const at::Tensor& x) {
    return x * x.sigmoid();
}

at::Tensor normed(const at::Tensor& x) {
    return x / (x.square().mean(-1, true) + kEps).sqrt();
}

Case zero_centered_case(std::int64_t rows, std::int64_t width) {
    return {"zero_centered",
            {random_normal({rows, width}, 1), random_normal({width}, 2)},
            [](const Tensors& t) { return rms_norm_zero_centered(t[0], t[1], kEps); },
            [](const Tensors& t) { return normed(t[0]) * (t[1] + 1); }};
}

Case gated_case(std::int64_t rows, std::int64_t width) {
    return {"gated",
            {random_normal({rows, width}, 1), random_normal({rows, width}, 2) * 3,
             random_normal({width}, 3)},
            [](const Tensors& t) { return rms_norm_gated(t[0], t[1], t[2], kEps); },
            [](const Tensors& t) { return normed(t[0]) * t[2] * silu_of(t[1]); }};
}

/// Two heads; `width` is that of a head, of which about two thirds are rotated.
Case rotary_case(std::int64_t rows, std::int64_t width) {
    const std::int64_t half = (width + 1) / 3;
    const RotaryTables tables =
        make_rotary_tables(at::arange(rows, at::kLong) * 37, 2 * half, 1e4, at::kFloat);
    const auto op = [tables](const Tensors& t) {
        return apply_partial_rotary(at::stack({t[0], t[1]}).transpose(0, 1), tables);
    };
    const auto formula = [tables, half](const Tensors& t) {
        const at::Tensor x = at::stack({t[0], t[1]}, 1);
        const at::Tensor c = tables.cos.narrow(1, 0, half).to(at::kDouble).unsqueeze(1);
        const at::Tensor s = tables.sin.narrow(1, 0, half).to(at::kDouble).unsqueeze(1);
        const at::Tensor first = x.narrow(2, 0, half), second = x.narrow(2, half, half);
        return at::cat({first * c - second * s, second * c + first * s,
                        x.narrow(2, 2 * half, x.size(2) - 2 * half)},
                       2);
    };
    return {
        "rotary", {random_normal({rows, width}, 1), random_normal({rows, width}, 2)}, op, formula};
}

std::vector<std::int64_t> cuts_of(std::int64_t rows) {
    std::vector<std::int64_t> cuts{0, 0};
    for (std::int64_t cut = 1; cut < rows; cut = 2 * cut + 1) {
        cuts.push_back(cut);
        cuts.push_back(cut);  // an empty segment
    }
    cuts.push_back(rows);
    cuts.push_back(rows);
    return cuts;
}

Case loss_case(std::int64_t rows, std::int64_t width) {
    at::Tensor targets = at::arange(rows, at::kLong) * 7 % width;
    targets.masked_fill_((at::arange(rows, at::kLong) % 5).eq(2), kIgnoredTarget);
    return {"loss",
            {random_normal({rows, width}, 1) * 4},
            [targets](const Tensors& t) { return cross_entropy_logits(t[0], targets).loss_sum; },
            [targets](const Tensors& t) {
                const at::Tensor at_target =
                    t[0].gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1);
                return (t[0].logsumexp(1) - at_target).masked_fill(targets.lt(0), 0).sum();
            }};
}

}  // namespace

at::Tensor activate(const at::Tensor& gate, const at::Tensor& up) {
    return Activation::apply(gate, up);
}

Case activation_case(std::int64_t rows, std::int64_t width) {
    return {"activation",
            {random_normal({rows, width}, 1) * 3, random_normal({rows, width}, 2)},
            [](const Tensors& t) { return activate(t[0], t[1]); },
            [](const Tensors& t) { return silu_of(t[0]) * t[1]; }};
}

Case conv_case(std::int64_t rows, std::int64_t width, std::int64_t num_taps) {
    const std::vector<std::int64_t> cuts = cuts_of(rows);
    const auto num_segments = static_cast<std::int64_t>(cuts.size()) - 1;
    const auto formula = [cuts](const Tensors& t) {
        Tensors parts{t[0].narrow(0, 0, 0)};
        for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
            const std::int64_t size = cuts[i + 1] - cuts[i];
            const at::Tensor all =
                at::cat({t[2][static_cast<std::int64_t>(i)], t[0].narrow(0, cuts[i], size)});
            at::Tensor sum = t[0].narrow(0, cuts[i], size) * 0;
            for (std::int64_t j = 0; j < t[1].size(1); ++j) {
                sum = sum + all.narrow(0, j, size) * t[1].select(1, j);
            }
            parts.push_back(silu_of(sum));
        }
        return at::cat(parts);
    };
    return {fmt::format("conv{}", num_taps),
            {random_normal({rows, width}, 1), random_normal({width, num_taps}, 2),
             random_normal({num_segments, num_taps - 1, width}, 3)},
            [cuts](const Tensors& t) { return causal_conv_silu(t[0], t[1], t[2], cuts); },
            formula};
}

std::vector<Case> pointwise_cases(std::int64_t rows, std::int64_t width) {
    return {zero_centered_case(rows, width), gated_case(rows, width),
            activation_case(rows, width),    rotary_case(rows, width),
            conv_case(rows, width, 4),       conv_case(rows, width, 3),
            loss_case(rows, width)};
}

}  // namespace hybridcp::testing
