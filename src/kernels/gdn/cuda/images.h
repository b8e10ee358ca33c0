#pragma once

// What the kernels of a backward pass leave for each other, by heads.

#include <ATen/core/Tensor.h>

#include "kernels/gdn/cuda/launch.h"

namespace hybridcp::gdn {

/// Key heads and their value heads that backward takes at once: what its kernels leave for each
/// other lives only meanwhile.
struct HeadPart {
    std::int64_t first_key_head, key_heads;
    std::int64_t first_value_head, value_heads;

    [[nodiscard]] std::int64_t group() const { return value_heads / key_heads; }
};

/// What backward needs of forward: H, E and T of every chunk (tables.h). E of two value heads of
/// each key head lies where dq and dk do later, so those come with them.
struct ForwardImages {
    at::Tensor dq, dk;  // [T, all key heads, 128]
    at::Tensor states, other_errors, inverses;
    at::Tensor marks;  // of the chunks that forward kept; or undefined: none

    /// Of a part's heads, uninitialised, with `marks` or not.
    [[nodiscard]] static ForwardImages make(const HeadPart& part,
                                            std::int64_t chunks,
                                            const at::Tensor& dq,
                                            const at::Tensor& dk,
                                            bool with_marks);
    /// Bytes of `states`, `other_errors` and `inverses`.
    [[nodiscard]] static std::int64_t bytes(const HeadPart& part, std::int64_t chunks);

    [[nodiscard]] bool defined() const { return states.defined(); }
    /// Those of some of the heads, in the same memory.
    [[nodiscard]] ForwardImages of(const HeadPart& part) const;
    [[nodiscard]] cuda::ForwardImages view(const HeadPart& part) const;
};

/// [heads of the part, chunks, bytes] of an image, on the device of `like`.
[[nodiscard]] at::Tensor new_image(const HeadPart& part,
                                   std::int64_t chunks,
                                   std::int64_t bytes,
                                   const at::Tensor& like);
[[nodiscard]] std::uint8_t* bytes_of(const at::Tensor& image);
/// From a head of rows [T, heads, 128] on.
[[nodiscard]] cuda::RowsView from_head(const at::Tensor& x, std::int64_t head);

}  // namespace hybridcp::gdn
