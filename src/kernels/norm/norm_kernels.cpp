#include "kernels/norm/norm_kernels.h"

#include "kernels/pointwise/elementary.h"

namespace hybridcp::HCP_ISA {
namespace {

constexpr std::int64_t kWidth = kLanes;

/// Sum of x^2. Four sums at a time: one would wait for its own last addition.
template <typename T>
HCP_INLINE float sum_of_squares(const T* x, std::int64_t width) {
    Vec sums[4] = {};
    std::int64_t i = 0;
    for (; i + 4 * kWidth <= width; i += 4 * kWidth) {
        for (std::int64_t k = 0; k < 4; ++k) {
            const Vec v = load(x + i + k * kWidth, AllLanes{});
            sums[k] += v * v;
        }
    }
    for_each_vector(width - i, [&](std::int64_t k, auto lanes) {
        const Vec v = load(x + i + k, lanes);
        sums[0] += v * v;
    });
    return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename T>
HCP_INLINE float inverse_rms(const T* x, const NormInputs& inputs) {
    const float mean = sum_of_squares(x, inputs.width) / static_cast<float>(inputs.width);
    return 1.0F / __builtin_sqrtf(mean + inputs.eps);
}

HCP_INLINE void clear(float* sums, std::int64_t width) {
    for (std::int64_t i = 0; i < width; ++i) {
        sums[i] = 0;
    }
}

HCP_INLINE float mean_of(Vec sum, std::int64_t width) {
    return sum_lanes(sum) / static_cast<float>(width);
}

void zero_centered(const NormInputs& inputs, const Rows& y, Range rows) {
    const float* weight = inputs.weight;
    with_element(inputs.element, [&]<typename T>(T /*element*/) {
        for (std::int64_t row = rows.begin; row < rows.end; ++row) {
            const T* x = row_of<T>(inputs.x, row);
            T* out = row_of<T>(y, row);
            const float inverse = inverse_rms(x, inputs);
            inputs.inverse[row] = inverse;
            for_each_vector(inputs.width, [&](std::int64_t i, auto lanes) {
                const Vec normed = load(x + i, lanes) * inverse;
                store(out + i, normed * load(weight + i, lanes), lanes);
            });
        }
    });
}

template <typename T>
HCP_INLINE void zero_centered_backward_row(const NormInputs& inputs,
                                           const NormGradients& gradients,
                                           std::int64_t row) {
    const T *x = row_of<T>(inputs.x, row), *dy = row_of<T>(gradients.dy, row);
    T* dx = row_of<T>(gradients.dx, row);
    const float* weight = inputs.weight;
    float* d_weights = gradients.d_weight;
    const float inverse = inputs.inverse[row];
    Vec sum = {};
    for_each_vector(inputs.width, [&](std::int64_t i, auto lanes) {
        float* d_weight = d_weights + i;
        const Vec product = load(dy + i, lanes) * (load(x + i, lanes) * inverse);
        store(d_weight, load(d_weight, lanes) + product, lanes);
        sum += product * load(weight + i, lanes);
    });
    const float projection = mean_of(sum, inputs.width);
    for_each_vector(inputs.width, [&](std::int64_t i, auto lanes) {
        const Vec normed = load(x + i, lanes) * inverse;
        const Vec d_normed = product(load(dy + i, lanes), load(weight + i, lanes));
        store(dx + i, (d_normed - normed * projection) * inverse, lanes);
    });
}

void zero_centered_backward(const NormInputs& inputs, const NormGradients& gradients, Range rows) {
    clear(gradients.d_weight, inputs.width);
    with_element(inputs.element, [&]<typename T>(T /*element*/) {
        for (std::int64_t row = rows.begin; row < rows.end; ++row) {
            zero_centered_backward_row<T>(inputs, gradients, row);
        }
    });
}

void gated(const NormInputs& inputs, const Rows& y, Range rows) {
    const float* weight = inputs.weight;
    with_element(inputs.element, [&]<typename T>(T /*element*/) {
        for (std::int64_t row = rows.begin; row < rows.end; ++row) {
            const T *x = row_of<T>(inputs.x, row), *z = row_of<T>(inputs.z, row);
            T* out = row_of<T>(y, row);
            const float inverse = inverse_rms(x, inputs);
            inputs.inverse[row] = inverse;
            for_each_vector(inputs.width, [&](std::int64_t i, auto lanes) {
                const Vec normed = rounded_to<T>(load(x + i, lanes) * inverse);
                const Vec weighted = rounded_to<T>(normed * load(weight + i, lanes));
                store(out + i, silu(load(z + i, lanes)) * weighted, lanes);
            });
        }
    });
}

template <typename T>
HCP_INLINE void gated_backward_row(const NormInputs& inputs,
                                   const NormGradients& gradients,
                                   std::int64_t row) {
    const T *x = row_of<T>(inputs.x, row), *dy = row_of<T>(gradients.dy, row);
    const T* z = row_of<T>(inputs.z, row);
    T *dx = row_of<T>(gradients.dx, row), *dz = row_of<T>(gradients.dz, row);
    float *d_normed = gradients.scratch, *d_weights = gradients.d_weight;
    const float* weights = inputs.weight;
    const float inverse = inputs.inverse[row];
    Vec sum = {};
    for_each_vector(inputs.width, [&](std::int64_t i, auto lanes) {
        const Vec gate = load(z + i, lanes), s = logistic(gate), d = load(dy + i, lanes);
        const Vec weight = load(weights + i, lanes);
        const Vec normed = load(x + i, lanes) * inverse;
        const Vec rounded = rounded_to<T>(normed);
        const Vec weighted = rounded_to<T>(rounded * weight);
        store(dz + i, d * weighted * silu_slope(gate, s), lanes);
        const Vec d_weighted = d * (gate * s);
        float* d_weight = d_weights + i;
        store(d_weight, load(d_weight, lanes) + d_weighted * rounded, lanes);
        store(d_normed + i, d_weighted * weight, lanes);
        sum += d_weighted * weight * normed;
    });
    const float projection = mean_of(sum, inputs.width);
    for_each_vector(inputs.width, [&](std::int64_t i, auto lanes) {
        const Vec normed = load(x + i, lanes) * inverse;
        store(dx + i, (load(d_normed + i, lanes) - normed * projection) * inverse, lanes);
    });
}

void gated_backward(const NormInputs& inputs, const NormGradients& gradients, Range rows) {
    clear(gradients.d_weight, inputs.width);
    with_element(inputs.element, [&]<typename T>(T /*element*/) {
        for (std::int64_t row = rows.begin; row < rows.end; ++row) {
            gated_backward_row<T>(inputs, gradients, row);
        }
    });
}

constexpr NormKernels kNormKernels{.zero_centered = zero_centered,
                                   .zero_centered_backward = zero_centered_backward,
                                   .gated = gated,
                                   .gated_backward = gated_backward};

}  // namespace

const NormKernels& norm_kernels() {
    return kNormKernels;
}

}  // namespace hybridcp::HCP_ISA
