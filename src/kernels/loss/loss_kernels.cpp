#include "kernels/loss/loss_kernels.h"

#include "kernels/pointwise/elementary.h"

namespace hybridcp::HCP_ISA {
namespace {

// Logits that are read for their maximum, then from the first-level cache for their exponentials.
constexpr std::int64_t kBlock = 1024;
constexpr float kLowest = -3.402823466e+38F;  // finite: a block of -inf only must not give NaN

template <typename T>
HCP_INLINE float maximum_of(const T* x, std::int64_t count, float at_least) {
    Vec largest = broadcast(at_least);
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        largest = maximum(largest, load(x + i, AllLanes{}));
    }
    float result = max_lanes(largest);
    for (; i < count; ++i) {
        const float value = to_float(x[i]);
        result = result > value ? result : value;
    }
    return result;
}

template <typename T>
HCP_INLINE float sum_of_exponentials(const T* x, std::int64_t count, float shift) {
    Vec sum = {};
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        sum += bounded_exp(load(x + i, AllLanes{}) - shift);
    }
    float rest = 0;
    for (; i < count; ++i) {
        rest += bounded_exp(broadcast(to_float(x[i]) - shift))[0];
    }
    return sum_lanes(sum) + rest;
}

template <typename T>
HCP_INLINE void loss_of_row(const LossRows& arguments, std::int64_t row) {
    const T* x = row_of<T>(arguments.logits, row);
    float largest = kLowest, sum = 0;
    for (std::int64_t begin = 0; begin < arguments.vocabulary; begin += kBlock) {
        const std::int64_t left = arguments.vocabulary - begin;
        const std::int64_t count = left < kBlock ? left : kBlock;
        const float previous = largest;
        largest = maximum_of(x + begin, count, previous);
        if (largest > previous) {
            sum *= bounded_exp(broadcast(previous - largest))[0];
        }
        sum += sum_of_exponentials(x + begin, count, largest);
    }
    arguments.statistics[2 * row] = largest;
    arguments.statistics[2 * row + 1] = sum;
    const std::int64_t target = arguments.targets[row];
    arguments.loss[row] = target < 0 ? 0.0F : __builtin_logf(sum) - (to_float(x[target]) - largest);
}

void loss(const LossRows& arguments, Range rows) {
    with_element(arguments.element, [&]<typename T>(T /*element*/) {
        for (std::int64_t row = rows.begin; row < rows.end; ++row) {
            loss_of_row<T>(arguments, row);
        }
    });
}

template <typename T>
HCP_INLINE void gradient_of_row(const LossRows& arguments, T* out, float scale, std::int64_t row) {
    const std::int64_t target = arguments.targets[row];
    if (target < 0) {
        for (std::int64_t i = 0; i < arguments.vocabulary; ++i) {
            from_float(out + i, 0);
        }
        return;
    }
    const T* x = row_of<T>(arguments.logits, row);
    const float largest = arguments.statistics[2 * row];
    const float factor = scale / arguments.statistics[2 * row + 1];
    const float at_target =
        bounded_exp(broadcast(to_float(x[target]) - largest))[0] * factor - scale;
    for_each_vector(arguments.vocabulary, [&](std::int64_t i, auto lanes) {
        store(out + i, bounded_exp(load(x + i, lanes) - largest) * factor, lanes);
    });
    from_float(out + target, at_target);
}

void gradient(const LossRows& arguments, const Rows& gradients, float scale, Range rows) {
    with_element(arguments.element, [&]<typename T>(T /*element*/) {
        for (std::int64_t row = rows.begin; row < rows.end; ++row) {
            gradient_of_row<T>(arguments, row_of<T>(gradients, row), scale, row);
        }
    });
}

constexpr LossKernels kLossKernels{.loss = loss, .gradient = gradient};

}  // namespace

const LossKernels& loss_kernels() {
    return kLossKernels;
}

}  // namespace hybridcp::HCP_ISA
