#include "gdn_cuda/support.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace hybridcp::test {

using at::Tensor;

namespace {

Tensor normal(at::IntArrayRef shape, at::Generator& generator) {
    return at::randn(shape, generator, at::TensorOptions().dtype(at::kFloat));
}

// The log decay of each head's mean token, between 0 and the fastest.
Tensor head_rates(std::int64_t heads, double fastest) {
    Tensor rates = at::full({heads}, fastest, at::kFloat);
    for (std::int64_t head = 0; head + 1 < heads; ++head) {
        rates[head] =
            head == 1 ? 0.0 : fastest / static_cast<double>(1 << (2 * (heads - 1 - head)));
    }
    return rates;
}

}  // namespace

GdnProblem make_problem(const ProblemOptions& options) {
    at::Generator generator = at::detail::createCPUGenerator(options.seed);
    const std::int64_t tokens = options.offsets.back();
    const std::int64_t heads = options.key_heads * options.group;
    const auto bf16 = [](const Tensor& x) { return x.to(at::kBFloat16); };
    GdnProblem problem;
    problem.offsets = options.offsets;
    GdnInputs& in = problem.inputs;
    in.q = bf16(normal({tokens, options.key_heads, 128}, generator) * options.qk_scale);
    in.k = bf16(normal({tokens, options.key_heads, 128}, generator) * options.qk_scale);
    in.v = bf16(normal({tokens, heads, 128}, generator));
    const Tensor spread = normal({tokens, heads}, generator).abs() * 0.8F + 0.2F;
    in.g = spread * head_rates(heads, options.log_decay);
    const Tensor beta = at::sigmoid(normal({tokens, heads}, generator));
    in.beta = options.fp32_beta ? beta : bf16(beta);
    if (options.start_states) {
        problem.S_start = normal({problem.segments(), heads, 128, 128}, generator) * 0.3F;
    }
    return problem;
}

GdnOutput reference_forward(const GdnProblem& problem) {
    const auto wide = [](const Tensor& x) { return x.defined() ? x.to(at::kDouble) : x; };
    const GdnInputs& in = problem.inputs;
    const GdnInputs inputs = {
        .q = wide(in.q), .k = wide(in.k), .v = wide(in.v), .g = wide(in.g), .beta = wide(in.beta)};
    return make_gdn_call(GdnBackend::kReference, inputs, problem.offsets, problem.options)
        ->forward(wide(problem.S_start));
}

Tables make_tables(const Offsets& offsets, int pieces) {
    Tables tables;
    for (std::size_t segment = 0; segment + 1 < offsets.size(); ++segment) {
        const auto first = static_cast<std::int32_t>(tables.chunks.size());
        for (std::int64_t token = offsets[segment]; token < offsets[segment + 1]; token += 64) {
            tables.chunks.push_back(
                {static_cast<std::int32_t>(token), static_cast<std::int32_t>(std::min<std::int64_t>(
                                                       64, offsets[segment + 1] - token))});
        }
        const auto chunks = static_cast<std::int32_t>(tables.chunks.size()) - first;
        const std::int32_t parts = std::min(chunks, pieces);
        for (std::int32_t index = 0; index < parts; ++index) {
            tables.pieces.push_back(
                {static_cast<std::int32_t>(segment), first, chunks, index, parts});
        }
    }
    return tables;
}

gdn::cuda::Shape shape_of(const GdnProblem& problem, const Tables& tables) {
    return {.tokens = static_cast<std::int32_t>(problem.tokens()),
            .key_heads = static_cast<std::int32_t>(problem.key_heads()),
            .value_heads = static_cast<std::int32_t>(problem.heads()),
            .num_chunks = static_cast<std::int32_t>(tables.chunks.size()),
            .scale = static_cast<float>(problem.options.scale.value_or(1.0 / std::sqrt(128.0))),
            .use_qk_l2norm = problem.options.use_qk_l2norm};
}

gdn::cuda::GateInputs gates_of(const GdnProblem& problem) {
    const Tensor& g = problem.inputs.g;
    const Tensor& beta = problem.inputs.beta;
    return {.g = g.const_data_ptr<float>(),
            .g_token_stride = g.stride(0),
            .g_head_stride = g.stride(1),
            .beta = beta.const_data_ptr(),
            .beta_token_stride = beta.stride(0),
            .beta_head_stride = beta.stride(1),
            .beta_is_bf16 = beta.scalar_type() == at::kBFloat16};
}

simt::TensorMap tensor_map(const Tensor& x) {
    return {.data = static_cast<std::byte*>(x.data_ptr()),
            .element_bytes = static_cast<std::uint32_t>(x.element_size()),
            .extent = {static_cast<std::uint32_t>(x.size(2)), static_cast<std::uint32_t>(x.size(1)),
                       static_cast<std::uint32_t>(x.size(0))},
            .stride_bytes = {static_cast<std::uint64_t>(x.stride(1) * x.element_size()),
                             static_cast<std::uint64_t>(x.stride(0) * x.element_size())},
            .box = {64, 1, 64}};
}

simt::Buffer buffer(const Tensor& x, bool writable) {
    std::int64_t last = 1;
    for (std::int64_t dim = 0; dim < x.dim(); ++dim) {
        last += (x.size(dim) - 1) * x.stride(dim);
    }
    return {x.data_ptr(), static_cast<std::size_t>(last * x.element_size()), writable};
}

Tensor poisoned(at::IntArrayRef shape, at::ScalarType type) {
    Tensor x = at::empty(shape, at::TensorOptions().dtype(type));
    std::memset(x.data_ptr(), 0xff, x.nbytes());
    return x;
}

Tensor unswizzled(const Tensor& panels) {
    Tensor result = at::empty_like(panels);
    const auto* from = static_cast<const std::uint16_t*>(panels.const_data_ptr());
    auto* to = static_cast<std::uint16_t*>(result.data_ptr());
    for (std::int64_t i = 0; i < panels.numel(); ++i) {
        const auto within = static_cast<std::uint32_t>(i % 4096);
        to[i] = from[i - within + device::swizzle_128(2 * within) / 2];
    }
    return result;
}

std::uint32_t inverse_at(std::uint32_t row, std::uint32_t column) {
    return gdn::cuda::inverse_block(row / 16, column / 16) +
           gdn::cuda::inverse_row(row % 16, column / 8 % 2) + 2 * (column % 8);
}

double relative_error(const Tensor& x, const Tensor& reference) {
    const Tensor wide = reference.to(at::kDouble);
    const double error = (x.to(at::kDouble) - wide).norm().item<double>();
    const double norm = wide.norm().item<double>();
    return std::isfinite(error) ? error / std::max(norm, 1e-30)
                                : std::numeric_limits<double>::infinity();
}

void expect_rows_close(const Tensor& x,
                       const Tensor& reference,
                       const Offsets& offsets,
                       double bar,
                       const std::string& what) {
    ASSERT_EQ(x.sizes(), reference.sizes()) << what;
    const std::int64_t end = offsets.back();
    for (std::int64_t head = 0; head < x.size(1); ++head) {
        const Tensor x_head = x.slice(0, 0, end).select(1, head);
        const Tensor reference_head = reference.slice(0, 0, end).select(1, head);
        EXPECT_LE(relative_error(x_head, reference_head), bar) << what << ", head " << head;
        for (std::size_t segment = 0; segment + 1 < offsets.size(); ++segment) {
            for (std::int64_t token = offsets[segment]; token < offsets[segment + 1]; token += 64) {
                const std::int64_t stop = std::min(token + 64, offsets[segment + 1]);
                EXPECT_LE(relative_error(x_head.slice(0, token, stop),
                                         reference_head.slice(0, token, stop)),
                          4 * bar)
                    << what << ", head " << head << ", segment " << segment << ", token " << token;
            }
        }
    }
}

void expect_states_close(const Tensor& x,
                         const Tensor& reference,
                         double bar,
                         const std::string& what) {
    ASSERT_EQ(x.sizes(), reference.sizes()) << what;
    for (std::int64_t segment = 0; segment < x.size(0); ++segment) {
        for (std::int64_t head = 0; head < x.size(1); ++head) {
            EXPECT_LE(relative_error(x[segment][head], reference[segment][head]), bar)
                << what << ", segment " << segment << ", head " << head;
        }
    }
}

}  // namespace hybridcp::test
