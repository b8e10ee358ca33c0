#include "train/gradient_reduction.h"

#include <ATen/ATen.h>

#include <cmath>
#include <span>

#include "core/memory_class.h"

namespace hybridcp {

namespace {
using Bucket = std::span<const NamedParameter>;

/// Consecutive parameters of up to `bucket_bytes` together, at least one each.
std::vector<Bucket> make_buckets(const std::vector<NamedParameter>& parameters,
                                 std::int64_t bucket_bytes) {
    std::vector<Bucket> buckets;
    std::size_t begin = 0;
    std::int64_t size_bytes = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const auto next_bytes = static_cast<std::int64_t>(parameters[i].value.nbytes());
        if (i > begin && size_bytes + next_bytes > bucket_bytes) {
            buckets.push_back(Bucket(parameters).subspan(begin, i - begin));
            begin = i;
            size_bytes = 0;
        }
        size_bytes += next_bytes;
    }
    buckets.push_back(Bucket(parameters).subspan(begin));
    return buckets;
}

void reduce_bucket(Bucket bucket, Group& world) {
    std::vector<at::Tensor> parts;
    for (const NamedParameter& parameter : bucket) {
        parts.push_back(parameter.value.grad().reshape({-1}));
    }
    at::Tensor flat = at::cat(parts);
    world.all_reduce_sum("gradients", flat);
    std::int64_t offset = 0;
    for (const NamedParameter& parameter : bucket) {
        at::Tensor grad = parameter.value.grad();
        grad.copy_(flat.narrow(0, offset, grad.numel()).view_as(grad));
        offset += grad.numel();
    }
}
}  // namespace

void all_reduce_gradients(const std::vector<NamedParameter>& parameters,
                          Group& world,
                          std::int64_t bucket_bytes) {
    const at::NoGradGuard no_grad;
    const MemoryScope scope(MemoryClass::kGradients);
    for (const NamedParameter& parameter : parameters) {
        at::Tensor value = parameter.value;
        if (!value.grad().defined()) {
            value.mutable_grad() = at::zeros_like(value);
        }
    }
    if (world.size() == 1 || parameters.empty()) {
        return;
    }
    for (const Bucket bucket : make_buckets(parameters, bucket_bytes)) {
        reduce_bucket(bucket, world);
    }
}

std::string first_non_finite_gradient(const std::vector<ParameterPiece>& pieces) {
    for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
        const at::Tensor& grad = piece->value.grad();
        if (grad.defined() && grad.numel() > 0 && !std::isfinite(grad.abs().max().item<float>())) {
            return piece->name;
        }
    }
    return "";
}

}  // namespace hybridcp
