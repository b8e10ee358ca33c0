#include "kernels/gdn/cuda/rows.h"

#include <ATen/ops/constant_pad_nd.h>

namespace hybridcp::gdn {

at::Tensor with_whole_rows(const at::Tensor& x) {
    return x.size(2) == cuda::kHeadDim ? x
                                       : at::constant_pad_nd(x, {0, cuda::kHeadDim - x.size(2)});
}
at::Tensor with_whole_states(const at::Tensor& x) {
    if (!x.defined()) {
        return x;
    }
    const at::Tensor wide = x.to(at::kFloat);
    const std::int64_t rows = cuda::kHeadDim - x.size(2), columns = cuda::kHeadDim - x.size(3);
    return (rows == 0 && columns == 0 ? wide : at::constant_pad_nd(wide, {0, columns, 0, rows}))
        .contiguous();
}

at::Tensor with_copyable_rows(const at::Tensor& x) {
    constexpr std::int64_t kElements = 8;  // 16 bytes
    const bool fits = x.stride(2) == 1 && x.stride(1) % kElements == 0 &&
                      x.stride(0) % kElements == 0 && x.stride(0) > 0 && x.stride(1) > 0 &&
                      reinterpret_cast<std::uintptr_t>(x.data_ptr()) % 16 == 0;
    return fits ? x : x.clone(at::MemoryFormat::Contiguous);
}
at::Tensor with_adjoining_heads(const at::Tensor& x) {
    return x.stride(1) == cuda::kHeadDim ? with_copyable_rows(x)
                                         : x.clone(at::MemoryFormat::Contiguous);
}
cuda::RowsView rows_of(const at::Tensor& x) {
    return {.data = x.data_ptr(), .token_stride = x.stride(0), .head_stride = x.stride(1)};
}

}  // namespace hybridcp::gdn
