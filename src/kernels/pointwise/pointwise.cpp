#include "kernels/pointwise/pointwise.h"

#include "hybridcp/error.h"
#include "kernels/pointwise/column_sums.h"
#include "kernels/simd/dispatch.h"

namespace hybridcp {

HCP_DECLARE_KERNELS(ColumnSums, column_sums)

namespace {

thread_local PointwiseBackend forced_backend = PointwiseBackend::kFused;

}  // namespace

ForcedPointwise::ForcedPointwise(PointwiseBackend backend) : previous_(forced_backend) {
    forced_backend = backend;
}

ForcedPointwise::~ForcedPointwise() {
    forced_backend = previous_;
}

bool takes_fused(std::initializer_list<at::Tensor> tensors) {
    const at::ScalarType dtype = tensors.begin()->scalar_type();
    return forced_backend == PointwiseBackend::kFused &&
           (dtype == at::kFloat || dtype == at::kBFloat16) &&
           std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
               return tensor.is_cpu() && tensor.scalar_type() == dtype;
           });
}

Element element_of(const at::Tensor& x) {
    HCP_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
              "fused kernels take fp32 and bf16, not {}", at::toString(x.scalar_type()));
    return x.scalar_type() == at::kBFloat16 ? Element::kBf16 : Element::kFloat;
}

at::Tensor as_rows(const at::Tensor& x) {
    const std::int64_t width = x.size(-1);
    std::int64_t num_rows = 1;
    for (std::int64_t dim = 0; dim + 1 < x.dim(); ++dim) {
        num_rows *= x.size(dim);
    }
    const at::Tensor rows = x.reshape({num_rows, width});
    return width <= 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

ConstRows read_rows(const at::Tensor& rows) {
    return {rows.const_data_ptr(), rows.stride(0)};
}

Rows write_rows(at::Tensor& rows) {
    return {rows.mutable_data_ptr(), rows.stride(0)};
}

at::Tensor sum_partials(const at::Tensor& partials) {
    at::Tensor sums = at::empty(partials.sizes().slice(1), partials.options());
    column_sums(selected_isa())
        .add(partials.const_data_ptr<float>(), partials.size(0), sums.numel(),
             sums.mutable_data_ptr<float>());
    return sums;
}

}  // namespace hybridcp
