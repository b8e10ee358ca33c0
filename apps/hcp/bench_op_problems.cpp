// The operators of `hcp bench OP`: inputs, kernel, formula, and the bytes that a pass has to move.
#include <ATen/ATen.h>

#include <cmath>

#include "hcp/bench_measure.h"
#include "hcp/bench_op.h"
#include "hybridcp/error.h"
#include "kernels/conv/causal_conv.h"
#include "kernels/loss/cross_entropy.h"
#include "kernels/mlp/swiglu.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/rotary/rotary.h"

namespace hybridcp::cli {

namespace {

constexpr double kEps = 1e-6;
constexpr std::int64_t kGatedHeadDim = 128;
constexpr std::int64_t kRotaryHeadDim = 256, kRotatedDims = 64;
// Few, so that the products do not hide the rest of the block.
constexpr std::int64_t kSwigluModelDim = 64;

struct Size {
    std::int64_t tokens, width;
    at::ScalarType dtype;

    [[nodiscard]] at::Tensor noise(at::IntArrayRef shape) const {
        return at::randn(shape).to(dtype);
    }
    [[nodiscard]] double element_bytes() const {
        return static_cast<double>(c10::elementSize(dtype));
    }
};

double bytes_of(const Size& size, double tensors) {
    return tensors * size.element_bytes() * static_cast<double>(size.tokens * size.width);
}

at::Tensor rms(const at::Tensor& x) {
    return x * at::rsqrt(x.square().mean(-1, true) + kEps);
}

OpProblem conv(const Size& size) {
    constexpr std::int64_t kTaps = 4;
    // Four sequences, one of them empty.
    const std::int64_t half = size.tokens / 2;
    const std::vector<std::int64_t> offsets{0, half, half, half + size.tokens / 3, size.tokens};
    const auto formula = [offsets](const Tensors& in) {
        Tensors parts;
        for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
            const at::Tensor x = at::constant_pad_nd(in[0].slice(0, offsets[i], offsets[i + 1]),
                                                     {0, 0, kTaps - 1, 0});
            at::Tensor y = at::zeros({1}, in[0].options());
            for (std::int64_t tap = 0; tap < kTaps; ++tap) {
                y = y + x.narrow(0, tap, offsets[i + 1] - offsets[i]) * in[1].select(1, tap);
            }
            parts.push_back(at::silu(y));
        }
        return at::cat(parts);
    };
    return {.inputs = {size.noise({size.tokens, size.width}), at::randn({size.width, kTaps})},
            .names = {"x", "weight"},
            .kernel =
                [offsets](const Tensors& in) {
                    return causal_conv_silu(in[0], in[1], at::Tensor(), offsets);
                },
            .formula = formula,
            .forward_bytes = bytes_of(size, 2),    // x; y
            .backward_bytes = bytes_of(size, 3)};  // x, dy; dx
}

OpProblem norm(const Size& size) {
    return {.inputs = {size.noise({size.tokens, size.width}), at::randn({size.width})},
            .names = {"x", "weight"},
            .kernel = [](const Tensors& in) { return rms_norm_zero_centered(in[0], in[1], kEps); },
            .formula = [](const Tensors& in) { return rms(in[0]) * (1 + in[1]); },
            .forward_bytes = bytes_of(size, 2),
            .backward_bytes = bytes_of(size, 3)};
}

OpProblem gated_norm(const Size& size) {
    const std::vector<std::int64_t> shape{size.tokens, size.width / kGatedHeadDim, kGatedHeadDim};
    return {.inputs = {size.noise(shape), size.noise(shape), at::randn({kGatedHeadDim})},
            .names = {"x", "z", "weight"},
            .kernel = [](const Tensors& in) { return rms_norm_gated(in[0], in[1], in[2], kEps); },
            .formula = [](const Tensors& in) { return in[2] * rms(in[0]) * at::silu(in[1]); },
            .forward_bytes = bytes_of(size, 3),    // x, z; y
            .backward_bytes = bytes_of(size, 5)};  // x, z, dy; dx, dz
}

OpProblem rotary(const Size& size) {
    const RotaryTables tables =
        make_rotary_tables(at::arange(size.tokens), kRotatedDims, 1e4, size.dtype);
    const auto formula = [tables](const Tensors& in) {
        const at::Tensor& x = in[0];
        const auto half = kRotatedDims / 2;
        const at::Tensor a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
        const at::Tensor cos = tables.cos.to(x.scalar_type()).narrow(-1, 0, half).unsqueeze(1);
        const at::Tensor sin = tables.sin.to(x.scalar_type()).narrow(-1, 0, half).unsqueeze(1);
        return at::cat({a * cos - b * sin, b * cos + a * sin,
                        x.narrow(-1, kRotatedDims, x.size(-1) - kRotatedDims)},
                       -1);
    };
    return {.inputs = {size.noise({size.tokens, size.width / kRotaryHeadDim, kRotaryHeadDim})},
            .names = {"x"},
            .kernel = [tables](const Tensors& in) { return apply_partial_rotary(in[0], tables); },
            .formula = formula,
            .forward_bytes = bytes_of(size, 2),
            .backward_bytes = bytes_of(size, 2)};
}

OpProblem swiglu_block(const Size& size) {
    const double scale = 1.0 / std::sqrt(static_cast<double>(kSwigluModelDim));
    const at::Tensor x = size.noise({size.tokens, kSwigluModelDim});
    const at::Tensor gate = at::randn({size.width, kSwigluModelDim}).mul_(scale);
    const at::Tensor down = at::randn({kSwigluModelDim, size.width}).mul_(scale);
    const at::Tensor w = gate.to(size.dtype), w_down = down.to(size.dtype);
    const at::Tensor hidden = size.noise({size.tokens, size.width});
    const auto wide_gradient = [](const at::Tensor& a, const at::Tensor& b) {
        return at::mm(a.t().to(at::kFloat), b.to(at::kFloat));
    };
    return {.inputs = {x, gate, at::randn({size.width, kSwigluModelDim}).mul_(scale), down},
            .names = {"x", "gate", "up", "down"},
            .kernel = [](const Tensors& in) { return swiglu(in[0], in[1], in[2], in[3]); },
            .formula =
                [](const Tensors& in) {
                    return at::mm(at::silu(at::mm(in[0], in[1].t())) * at::mm(in[0], in[2].t()),
                                  in[3].t());
                },
            .forward_bytes = bytes_of(size, 3),   // a, b; silu(a) b
            .backward_bytes = bytes_of(size, 6),  // a, b, dh; da, db, silu(a) b
            .forward_products =
                [=] {
                    (void)at::mm(x, w.t());
                    (void)at::mm(x, w.t());
                    (void)at::mm(hidden, w_down.t());
                },
            .backward_products =
                [=] {
                    (void)at::mm(x, w_down);
                    (void)at::addmm(at::mm(hidden, w), hidden, w);
                    (void)wide_gradient(x, hidden);
                    (void)wide_gradient(hidden, x);
                    (void)wide_gradient(hidden, x);
                }};
}

OpProblem cross_entropy(const Size& size) {
    const at::Tensor targets = at::randint(size.width, {size.tokens}, at::kLong);
    targets.narrow(0, 0, size.tokens / 8).fill_(kIgnoredTarget);
    const auto formula = [targets](const Tensors& in) {
        const at::Tensor counted = targets.ne(kIgnoredTarget);
        const at::Tensor picked = in[0].gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1);
        return (at::logsumexp(in[0], {1}) - picked).mul(counted).sum();
    };
    return {
        .inputs = {size.noise({size.tokens, size.width})},
        .names = {"logits"},
        .kernel =
            [targets](const Tensors& in) { return cross_entropy_logits(in[0], targets).loss_sum; },
        .formula = formula,
        .forward_bytes = bytes_of(size, 1),    // logits
        .backward_bytes = bytes_of(size, 2)};  // logits; their gradient
}

struct Op {
    const char* name;
    OpProblem (*make)(const Size&);
    std::int64_t width;
    std::int64_t multiple;  // what a width must be a multiple of
};

constexpr std::array kOps{
    Op{"conv", conv, 4096, 1},
    Op{"norm", norm, 2048, 1},
    Op{"gated_norm", gated_norm, 4096, kGatedHeadDim},
    Op{"rotary", rotary, 4096, kRotaryHeadDim},
    Op{"swiglu", swiglu_block, 3584, 1},
    Op{"cross_entropy", cross_entropy, 16384, 1},
};

}  // namespace

std::vector<std::string> bench_op_names() {
    std::vector<std::string> names;
    for (const Op& op : kOps) {
        names.emplace_back(op.name);
    }
    return names;
}

OpProblem make_op_problem(const std::string& name,
                          std::int64_t tokens,
                          std::int64_t width,
                          at::ScalarType dtype) {
    for (const Op& op : kOps) {
        if (op.name != name) {
            continue;
        }
        const Size size{tokens, width == 0 ? op.width : width, dtype};
        if (size.width % op.multiple != 0) {
            throw UsageError(
                fmt::format("bench {} --width {}: heads have {} features, so it must be a multiple "
                            "of that",
                            name, size.width, op.multiple));
        }
        at::manual_seed(23);
        return op.make(size);
    }
    throw CheckError(fmt::format("bench {}: no such operator", name));
}

}  // namespace hybridcp::cli
