#include "kernels/rotary/fused_rotary.h"

#include "kernels/pointwise/pointwise.h"
#include "kernels/rotary/rotary_kernels.h"
#include "kernels/simd/dispatch.h"

namespace hybridcp {

HCP_DECLARE_KERNELS(RotaryKernels, rotary_kernels)

at::Tensor fused_rotate(const at::Tensor& x,
                        const at::Tensor& cos,
                        const at::Tensor& sin,
                        double sign) {
    const at::Tensor heads = x.size(2) <= 1 || x.stride(2) == 1 ? x : x.contiguous();
    const at::Tensor cos_rows = as_rows(cos.to(at::kFloat)), sin_rows = as_rows(sin.to(at::kFloat));
    at::Tensor y = at::empty(x.sizes(), x.options());
    const RotaryArguments arguments{.element = element_of(x),
                                    .heads = x.size(1),
                                    .head_dim = x.size(2),
                                    .half = cos.size(1),
                                    .x = heads.const_data_ptr(),
                                    .token_stride = heads.stride(0),
                                    .head_stride = heads.stride(1),
                                    .cos = read_rows(cos_rows),
                                    .sin = read_rows(sin_rows),
                                    .sign = static_cast<float>(sign),
                                    .y = y.mutable_data_ptr()};
    const RotaryKernels& kernels = rotary_kernels(selected_isa());
    for_each_block(x.size(0), rows_of_task(x.size(1) * x.size(2), 1),
                   [&](Range tokens, std::int64_t /*block*/, int /*thread*/) {
                       kernels.rotate(arguments, tokens);
                   });
    return y;
}

}  // namespace hybridcp
