#include "kernels/rotary/rotary_kernels.h"

#include "kernels/pointwise/elementary.h"

namespace hybridcp::HCP_ISA {
namespace {

template <typename T>
HCP_INLINE void rotate_token(const RotaryArguments& arguments, std::int64_t token) {
    const std::int64_t half = arguments.half, head_dim = arguments.head_dim;
    const float *cos = row_of<float>(arguments.cos, token),
                *sin = row_of<float>(arguments.sin, token);
    for (std::int64_t head = 0; head < arguments.heads; ++head) {
        const T* x = static_cast<const T*>(arguments.x) + token * arguments.token_stride +
                     head * arguments.head_stride;
        T* y = static_cast<T*>(arguments.y) + (token * arguments.heads + head) * head_dim;
        for_each_vector(half, [&](std::int64_t i, auto lanes) {
            const Vec first = load(x + i, lanes), second = load(x + half + i, lanes);
            const Vec c = load(cos + i, lanes), s = load(sin + i, lanes) * arguments.sign;
            store(y + i, product(first, c) - second * s, lanes);
            store(y + half + i, product(second, c) + first * s, lanes);
        });
        std::memcpy(y + 2 * half, x + 2 * half,
                    sizeof(T) * static_cast<std::size_t>(head_dim - 2 * half));
    }
}

void rotate(const RotaryArguments& arguments, Range tokens) {
    with_element(arguments.element, [&]<typename T>(T /*element*/) {
        for (std::int64_t token = tokens.begin; token < tokens.end; ++token) {
            rotate_token<T>(arguments, token);
        }
    });
}

constexpr RotaryKernels kRotaryKernels{.rotate = rotate};

}  // namespace

const RotaryKernels& rotary_kernels() {
    return kRotaryKernels;
}

}  // namespace hybridcp::HCP_ISA
