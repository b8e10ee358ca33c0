#include "kernels/gdn/gdn.h"

#include <fmt/ranges.h>

#include <cmath>

#include "hybridcp/error.h"
#include "kernels/gdn/backends.h"
#include "kernels/gdn/chunk_layout.h"

namespace hybridcp {
namespace {

std::string shape_text(at::IntArrayRef shape) {
    return fmt::format("[{}]", fmt::join(shape, ", "));
}

void check_shape(const at::Tensor& tensor, const char* name, at::IntArrayRef shape) {
    if (!tensor.defined()) {
        throw UsageError(
            fmt::format("gdn: {} is undefined; it must have shape {}", name, shape_text(shape)));
    }
    if (tensor.sizes() != shape) {
        throw UsageError(fmt::format("gdn: {} has shape {}; it must have shape {}", name,
                                     shape_text(tensor.sizes()), shape_text(shape)));
    }
}

void check_shapes(const GdnInputs& in) {
    for (const auto& [tensor, name] : {std::pair{&in.q, "q"}, std::pair{&in.v, "v"}}) {
        if (!tensor->defined() || tensor->dim() != 3) {
            throw UsageError(fmt::format("gdn: {} must have shape [tokens, heads, dim]", name));
        }
    }
    const std::int64_t value_heads = in.v.size(1);
    check_shape(in.k, "k", in.q.sizes());
    check_shape(in.v, "v", {in.q.size(0), value_heads, in.v.size(2)});
    check_shape(in.g, "g", {in.q.size(0), value_heads});
    check_shape(in.beta, "beta", {in.q.size(0), value_heads});
    if (in.q.size(1) == 0 || value_heads == 0 || value_heads % in.q.size(1) != 0) {
        throw UsageError(
            fmt::format("gdn: {} value heads cannot share {} key heads; the number of "
                        "value heads must be a multiple of that of key heads",
                        value_heads, in.q.size(1)));
    }
    if (in.q.size(2) == 0 || in.v.size(2) == 0) {
        throw UsageError("gdn: head dims of q, k and v must not be 0");
    }
}

void check_dtypes(const GdnInputs& in) {
    const auto is_activation = [](at::ScalarType type) {
        return type == at::kFloat || type == at::kBFloat16 || type == at::kDouble;
    };
    const at::ScalarType type = in.q.scalar_type();
    if (!is_activation(type) || in.k.scalar_type() != type || in.v.scalar_type() != type ||
        !is_activation(in.beta.scalar_type())) {
        throw UsageError(
            fmt::format("gdn: q, k, v and beta are {}, {}, {} and {}; q, k and v must share one of "
                        "float, bfloat16 "
                        "and double, and beta be one of them",
                        c10::toString(type), c10::toString(in.k.scalar_type()),
                        c10::toString(in.v.scalar_type()), c10::toString(in.beta.scalar_type())));
    }
    if (in.g.scalar_type() != at::kFloat && in.g.scalar_type() != at::kDouble) {
        throw UsageError(fmt::format("gdn: g is {}; log decays must be float or double",
                                     c10::toString(in.g.scalar_type())));
    }
    for (const at::Tensor* tensor : {&in.k, &in.v, &in.g, &in.beta}) {
        if (tensor->device() != in.q.device()) {
            throw UsageError(fmt::format("gdn: inputs are on {} and {}; they must be on one device",
                                         in.q.device().str(), tensor->device().str()));
        }
    }
}

void check_offsets(const std::vector<std::int64_t>& offsets, std::int64_t num_tokens) {
    if (offsets.empty() || offsets.front() != 0) {
        throw UsageError("gdn: segment offsets must start at 0");
    }
    for (std::size_t i = 1; i < offsets.size(); ++i) {
        if (offsets[i] < offsets[i - 1]) {
            throw UsageError(fmt::format("gdn: segment offsets decrease from {} to {} at entry {}",
                                         offsets[i - 1], offsets[i], i));
        }
    }
    if (offsets.back() > num_tokens) {
        throw UsageError(fmt::format("gdn: segment offsets end at {}, but there are {} tokens",
                                     offsets.back(), num_tokens));
    }
}

}  // namespace

namespace gdn {

void check_optional_shape(const at::Tensor& tensor, const char* name, at::IntArrayRef shape) {
    if (tensor.defined()) {
        check_shape(tensor, name, shape);
    }
}

Problem make_problem(const GdnInputs& inputs,
                     const GdnSegments& segments,
                     const GdnOptions& options) {
    check_shapes(inputs);
    check_dtypes(inputs);
    check_offsets(segments.offsets(), inputs.q.size(0));
    if (options.chunk_size < 1 || options.chunk_size > 256) {
        throw UsageError(fmt::format("gdn: chunk_size is {}; it must be in 1..256 (64 is usual)",
                                     options.chunk_size));
    }
    if (!(options.kept_share >= 0.0 && options.kept_share <= 1.0)) {
        throw UsageError(fmt::format("gdn: kept_share is {}; it must be in [0, 1] (1 is usual)",
                                     options.kept_share));
    }
    return {.inputs = {.q = inputs.q.detach(),
                       .k = inputs.k.detach(),
                       .v = inputs.v.detach(),
                       .g = inputs.g.detach(),
                       .beta = inputs.beta.detach()},
            .segments = segments,
            .offsets = segments.offsets(),
            .scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(inputs.q.size(2)))),
            .use_qk_l2norm = options.use_qk_l2norm,
            .chunk_size = options.chunk_size,
            .summary_floor = options.summary_floor.value_or(GdnOptions::kExactSummary),
            .keep_intermediates = options.keep_intermediates,
            .kept_share = options.kept_share};
}

}  // namespace gdn

struct GdnSegments::Cache {
    std::shared_ptr<const gdn::ChunkLayout> chunks;
    std::shared_ptr<const void> backend_tables;
    std::int64_t num_tokens = 0;
    at::Device device = at::kCPU;
};

GdnSegments::GdnSegments(std::vector<std::int64_t> offsets)
    : offsets_(std::move(offsets)), cache_(std::make_shared<Cache>()) {}

std::shared_ptr<const gdn::ChunkLayout> GdnSegments::chunks(
    std::int64_t num_tokens, std::int64_t chunk_size, const at::TensorOptions& options) const {
    if (!cache_->chunks || cache_->num_tokens != num_tokens ||
        cache_->chunks->chunk_size() != chunk_size || cache_->device != options.device()) {
        cache_->chunks =
            std::make_shared<const gdn::ChunkLayout>(offsets_, num_tokens, chunk_size, options);
        cache_->num_tokens = num_tokens;
        cache_->device = options.device();
    }
    return cache_->chunks;
}

std::shared_ptr<const void>& GdnSegments::backend_tables() const {
    return cache_->backend_tables;
}

std::shared_ptr<GdnCall> make_gdn_call(GdnBackend backend,
                                       const GdnInputs& inputs,
                                       const GdnSegments& segments,
                                       const GdnOptions& options) {
    gdn::Problem problem = gdn::make_problem(inputs, segments, options);
    switch (backend) {
        case GdnBackend::kReference:
            return gdn::make_reference_call(std::move(problem));
        case GdnBackend::kEager:
            return gdn::make_eager_call(std::move(problem));
        case GdnBackend::kFused:
#ifdef HCP_CUDA
            if (problem.inputs.q.is_cuda()) {
                return gdn::make_cuda_call(std::move(problem));
            }
#endif
            return gdn::make_fused_call(std::move(problem));
    }
    throw UsageError("gdn: unknown backend; choose reference, eager or fused");
}

}  // namespace hybridcp
