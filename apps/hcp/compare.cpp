#include "hcp/compare.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>

#include "hybridcp/error.h"

namespace hybridcp::cli {

namespace {

constexpr double kAlmostZeroHead = 1e-6;  // of the largest head's norm

at::Tensor widened(const at::Tensor& tensor) {
    return tensor.detach().to(at::kCPU, at::kDouble);
}

void check_shapes(const at::Tensor& actual, const at::Tensor& expected) {
    HCP_CHECK(actual.sizes() == expected.sizes(),
              "the result has shape {} but the reference {}: was the file made for this operator?",
              fmt::format("{}", fmt::join(actual.sizes(), "x")),
              fmt::format("{}", fmt::join(expected.sizes(), "x")));
}

double quotient(double error, double norm) {
    if (norm > 0.0 || std::isnan(error)) {
        return error / norm;
    }
    return error == 0.0 ? 0.0 : std::numeric_limits<double>::infinity();
}

std::string index_name(std::int64_t flat, at::IntArrayRef sizes) {
    std::vector<std::int64_t> index(sizes.size());
    for (std::size_t dim = sizes.size(); dim-- > 0;) {
        index[dim] = flat % sizes[dim];
        flat /= sizes[dim];
    }
    return fmt::format("[{}]", fmt::join(index, ","));
}

Difference largest(const at::Tensor& distance) {
    if (distance.numel() == 0) {
        return {};
    }
    const std::int64_t worst =
        distance.flatten().argmax().item<std::int64_t>();  // NaN counts as largest
    return {distance.flatten()[worst].item<double>(), index_name(worst, distance.sizes())};
}

}  // namespace

Difference relative_l2(const at::Tensor& actual, const at::Tensor& expected) {
    check_shapes(actual, expected);
    const at::Tensor reference = widened(expected);
    const double error = (widened(actual) - reference).norm().item<double>();
    return {quotient(error, reference.norm().item<double>())};
}

Difference relative_l2_per_head(const at::Tensor& actual,
                                const at::Tensor& expected,
                                std::int64_t head_dim,
                                double bar) {
    check_shapes(actual, expected);
    const std::int64_t num_heads = expected.size(head_dim);
    const at::Tensor reference = widened(expected).movedim(head_dim, 0).reshape({num_heads, -1});
    const at::Tensor result = widened(actual).movedim(head_dim, 0).reshape({num_heads, -1});
    const at::Tensor errors = (result - reference).norm(2, {1});
    const at::Tensor norms = reference.norm(2, {1});
    const double largest_norm = norms.max().item<double>();
    Difference worst;
    for (std::int64_t head = 0; head < num_heads; ++head) {
        const double norm = norms[head].item<double>();
        double error = errors[head].item<double>();
        if (norm < kAlmostZeroHead * largest_norm) {
            error *= bar / (bar * norm + kAlmostZeroHead * largest_norm);
        } else {
            error = quotient(error, norm);
        }
        if (!(error <= worst.error) || worst.where.empty()) {
            worst = {error, fmt::format("head {}", head)};
        }
    }
    return worst;
}

Difference max_abs(const at::Tensor& actual, const at::Tensor& expected) {
    check_shapes(actual, expected);
    return largest((widened(actual) - widened(expected)).abs());
}

Difference bf16_steps(const at::Tensor& actual, const at::Tensor& expected) {
    check_shapes(actual, expected);
    // The bits of a float, sign and magnitude, mapped to integers that are ordered as the values
    // are.
    const auto ordered = [](const at::Tensor& tensor) {
        const at::Tensor bits =
            tensor.detach().to(at::kCPU, at::kBFloat16).contiguous().view(at::kShort).to(at::kLong);
        return at::where(bits < 0, -32768 - bits, bits);
    };
    return largest((ordered(actual) - ordered(expected)).abs());
}

}  // namespace hybridcp::cli
