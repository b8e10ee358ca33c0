#include "kernels/conv/conv_kernels.h"

#include "kernels/pointwise/elementary.h"

namespace hybridcp::HCP_ISA {
namespace {

/// One channel block of one segment. W is the number of taps, or 0 where only the run time knows.
template <typename T, int W>
class SegmentBlock {
  public:
    SegmentBlock(const ConvInputs& inputs, Range channels, std::int64_t segment)
        : inputs_(inputs),
          channels_(channels),
          segment_(segment),
          start_(inputs.offsets[segment]),
          end_(inputs.offsets[segment + 1]) {}

    void forward(const Rows& y, Range tokens) const {
        const auto taps = all_taps();
        for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
            const auto window = window_of(t);
            T* out = row_of<T>(y, t) + channels_.begin;
            for_each_vector(size(), [&](std::int64_t c, auto lanes) {
                store(out + c, silu(correlate(window, taps, c, lanes)), lanes);
            });
        }
    }

    /// dx of a token needs the convolved gradient of the W-1 tokens after it too: a ring keeps
    /// those of the last W tokens.
    void backward(const ConvGradients& gradients, Range tokens) const {
        const std::int64_t history = num_taps() - 1;
        const bool is_first = tokens.begin == start_;
        const std::int64_t first_dx =
            is_first && gradients.d_halo != nullptr ? start_ - history : tokens.begin;
        for (std::int64_t i = 0; i < num_taps() * kConvChannels; ++i) {
            gradients.ring[i] = 0;
        }
        for (std::int64_t t = tokens.begin; t < tokens.end + history; ++t) {
            float* newest = ring_row(gradients, t);
            if (t >= end_) {
                for_each_vector(
                    size(), [&](std::int64_t c, auto lanes) { store(newest + c, Vec{}, lanes); });
            } else if (t < tokens.end) {
                convolved_gradient<true>(gradients, t);
            } else {
                convolved_gradient<false>(gradients, t);
            }
            if (t - history >= first_dx) {
                input_gradient(gradients, t - history);
            }
        }
    }

  private:
    /// A pointer for each tap. These are copied to the stack before a loop over channels: what the
    /// loop stores could change members of this class, for all that the compiler knows.
    template <typename Value>
    struct PerTap {
        Value* at[W > 0 ? W : kConvMostTaps];
    };

    [[nodiscard]] HCP_INLINE std::int64_t num_taps() const { return W > 0 ? W : inputs_.num_taps; }
    [[nodiscard]] HCP_INLINE std::int64_t size() const { return channels_.end - channels_.begin; }

    /// of(j) for each tap j.
    template <typename Value, typename Of>
    [[nodiscard]] HCP_INLINE PerTap<Value> per_tap(const Of& of) const {
        PerTap<Value> all;
        for (std::int64_t j = 0; j < num_taps(); ++j) {
            all.at[j] = of(j);
        }
        return all;
    }

    [[nodiscard]] HCP_INLINE PerTap<const float> all_taps() const {
        return per_tap<const float>(
            [&](std::int64_t j) { return inputs_.taps + j * inputs_.channels + channels_.begin; });
    }

    /// The rows that an output row t is made of: t-W+1 .. t.
    [[nodiscard]] HCP_INLINE PerTap<const T> window_of(std::int64_t t) const {
        return per_tap<const T>([&](std::int64_t j) { return source(t - num_taps() + 1 + j); });
    }

    [[nodiscard]] HCP_INLINE const T* source(std::int64_t t) const {
        alignas(64) static const T kZeros[kConvChannels] = {};
        if (t >= start_) {
            return row_of<T>(inputs_.x, t) + channels_.begin;
        }
        if (inputs_.halo == nullptr) {
            return kZeros;
        }
        return static_cast<const T*>(inputs_.halo) + halo_offset(t);
    }

    /// Of row t < start of the segment, in a tensor like the halo.
    [[nodiscard]] HCP_INLINE std::int64_t halo_offset(std::int64_t t) const {
        const std::int64_t row = segment_ * (num_taps() - 1) + num_taps() - 1 + t - start_;
        return row * inputs_.channels + channels_.begin;
    }

    [[nodiscard]] HCP_INLINE float* ring_row(const ConvGradients& gradients, std::int64_t t) const {
        return gradients.ring + ((t - start_ + num_taps()) % num_taps()) * kConvChannels;
    }

    /// sum_j rows_j taps_j
    template <typename Value, typename Lanes>
    [[nodiscard]] HCP_INLINE Vec correlate(const PerTap<Value>& rows,
                                           const PerTap<const float>& taps,
                                           std::int64_t c,
                                           Lanes lanes) const {
        Vec sum = product(load(rows.at[0] + c, lanes), load(taps.at[0] + c, lanes));
        for (std::int64_t j = 1; j < num_taps(); ++j) {
            sum += load(rows.at[j] + c, lanes) * load(taps.at[j] + c, lanes);
        }
        return sum;
    }

    /// The gradient of the convolution's output at t, into the ring; its products with the window
    /// are added to the gradient of the taps where this block owns t.
    template <bool AddToTaps>
    void convolved_gradient(const ConvGradients& gradients, std::int64_t t) const {
        const auto window = window_of(t);
        const auto taps = all_taps();
        const auto sums = per_tap<float>([&](std::int64_t j) {
            return gradients.d_taps + j * inputs_.channels + channels_.begin;
        });
        const T* dy = row_of<T>(gradients.dy, t) + channels_.begin;
        float* newest = ring_row(gradients, t);
        for_each_vector(size(), [&](std::int64_t c, auto lanes) {
            const Vec convolved = correlate(window, taps, c, lanes);
            const Vec d = load(dy + c, lanes) * silu_slope(convolved, logistic(convolved));
            store(newest + c, d, lanes);
            for (std::int64_t j = 0; AddToTaps && j < num_taps(); ++j) {
                float* sum = sums.at[j] + c;
                store(sum, load(sum, lanes) + d * load(window.at[j] + c, lanes), lanes);
            }
        });
    }

    /// dx_t = sum_j taps_j d_{t+W-1-j}; a row before the segment belongs to the halo.
    void input_gradient(const ConvGradients& gradients, std::int64_t t) const {
        if (t < start_) {
            write_input_gradient(gradients, t, gradients.d_halo + halo_offset(t));
        } else {
            write_input_gradient(gradients, t, row_of<T>(gradients.dx, t) + channels_.begin);
        }
    }

    template <typename Out>
    HCP_INLINE void write_input_gradient(const ConvGradients& gradients,
                                         std::int64_t t,
                                         Out* out) const {
        const auto taps = all_taps();
        const auto rows = per_tap<const float>(
            [&](std::int64_t j) { return ring_row(gradients, t + num_taps() - 1 - j); });
        for_each_vector(size(), [&](std::int64_t c, auto lanes) {
            store(out + c, correlate(rows, taps, c, lanes), lanes);
        });
    }

    const ConvInputs& inputs_;
    Range channels_;
    std::int64_t segment_;
    std::int64_t start_;
    std::int64_t end_;
};

/// Calls body(segment block, tokens) for each segment that the block of tokens meets.
template <typename T, int W, typename Body>
HCP_INLINE void for_each_segment(const ConvInputs& inputs,
                                 const ConvBlock& block,
                                 const Body& body) {
    std::int64_t begin = block.tokens.begin;
    for (std::int64_t i = block.first_segment; i < inputs.num_segments && begin < block.tokens.end;
         ++i) {
        const std::int64_t segment_end = inputs.offsets[i + 1];
        const std::int64_t end = segment_end < block.tokens.end ? segment_end : block.tokens.end;
        if (begin < end) {
            body(SegmentBlock<T, W>(inputs, block.channels, i), Range{begin, end});
            begin = end;
        }
    }
}

/// Calls body(a T, the number of taps as a type) of the kernels that fit the inputs.
template <typename Body>
HCP_INLINE void with_kinds(const ConvInputs& inputs, const Body& body) {
    with_element(inputs.element, [&](auto element) {
        if (inputs.num_taps == 4) {
            body.template operator()<decltype(element), 4>();
        } else {
            body.template operator()<decltype(element), 0>();
        }
    });
}

void forward(const ConvInputs& inputs, const Rows& y, const ConvBlock& block) {
    with_kinds(inputs, [&]<typename T, int W>() {
        for_each_segment<T, W>(inputs, block, [&](const SegmentBlock<T, W>& part, Range tokens) {
            part.forward(y, tokens);
        });
    });
}

void backward(const ConvInputs& inputs, const ConvGradients& gradients, const ConvBlock& block) {
    for (std::int64_t j = 0; j < inputs.num_taps; ++j) {
        float* sums = gradients.d_taps + j * inputs.channels;
        for (std::int64_t c = block.channels.begin; c < block.channels.end; ++c) {
            sums[c] = 0;
        }
    }
    with_kinds(inputs, [&]<typename T, int W>() {
        for_each_segment<T, W>(inputs, block, [&](const SegmentBlock<T, W>& part, Range tokens) {
            part.backward(gradients, tokens);
        });
    });
}

constexpr ConvKernels kConvKernels{.forward = forward, .backward = backward};

}  // namespace

const ConvKernels& conv_kernels() {
    return kConvKernels;
}

}  // namespace hybridcp::HCP_ISA
