#include "kernels/gdn/cuda/images.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "kernels/gdn/cuda/rows.h"

namespace hybridcp::gdn {
namespace {

/// Of the value heads whose E has a place of its own.
std::int64_t other_heads(const HeadPart& part) {
    return std::max<std::int64_t>(part.value_heads - 2 * part.key_heads, 0);
}

}  // namespace

ForwardImages ForwardImages::make(const HeadPart& part,
                                  std::int64_t chunks,
                                  const at::Tensor& dq,
                                  const at::Tensor& dk,
                                  bool with_marks) {
    const std::int64_t others = other_heads(part);
    return {.dq = dq,
            .dk = dk,
            .states = new_image(part, chunks, cuda::kStateBytes, dq),
            .other_errors =
                others > 0
                    ? at::empty({dq.size(0), others, std::int64_t{cuda::kHeadDim}}, dq.options())
                    : at::Tensor(),
            .inverses = new_image(part, chunks, cuda::kInverseBytes, dq),
            .marks = with_marks ? new_image(part, chunks, 1, dq) : at::Tensor()};
}
std::int64_t ForwardImages::bytes(const HeadPart& part, std::int64_t chunks) {
    return chunks * (part.value_heads * (std::int64_t{cuda::kStateBytes} + cuda::kInverseBytes) +
                     other_heads(part) * cuda::kRowsBytes);
}

ForwardImages ForwardImages::of(const HeadPart& part) const {
    ForwardImages some = *this;
    for (at::Tensor* x : {&some.states, &some.inverses, &some.marks}) {
        if (x->defined()) {
            *x = x->narrow(0, part.first_value_head, part.value_heads);
        }
    }
    if (other_errors.defined()) {
        const std::int64_t others = part.group() - 2;
        some.other_errors =
            other_errors.narrow(1, part.first_key_head * others, part.key_heads * others);
    }
    return some;
}

cuda::ForwardImages ForwardImages::view(const HeadPart& part) const {
    cuda::ForwardImages view{};
    view.states = bytes_of(states);
    view.errors[0] = from_head(dq, part.first_key_head);
    if (part.group() > 1) {
        view.errors[1] = from_head(dk, part.first_key_head);
    }
    if (other_errors.defined()) {
        view.errors[2] = rows_of(other_errors);
    }
    view.inverses = bytes_of(inverses);
    view.kept = bytes_of(marks);
    return view;
}

at::Tensor new_image(const HeadPart& part,
                     std::int64_t chunks,
                     std::int64_t bytes,
                     const at::Tensor& like) {
    return at::empty({part.value_heads, chunks, bytes}, like.options().dtype(at::kByte));
}
std::uint8_t* bytes_of(const at::Tensor& image) {
    return image.defined() ? image.data_ptr<std::uint8_t>() : nullptr;
}
cuda::RowsView from_head(const at::Tensor& x, std::int64_t head) {
    return rows_of(x.narrow(1, head, x.size(1) - head));
}

}  // namespace hybridcp::gdn
