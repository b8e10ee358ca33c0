// Causal convolution and SiLU in one pass over memory, forward and backward, for a block of tokens
// and channels at a time. The maths is in causal_conv.h.
#pragma once

#include "kernels/pointwise/arguments.h"

namespace hybridcp {

/// Channels of a block: its rows of a window, taps and sums fit the first-level cache.
inline constexpr std::int64_t kConvChannels = 512;
/// Wider windows are left to the plain implementation.
inline constexpr std::int64_t kConvMostTaps = 8;

struct ConvInputs {
    Element element;
    std::int64_t num_taps;  // W
    std::int64_t channels;  // C
    const std::int64_t* offsets;
    std::int64_t num_segments;
    ConstRows x;        // [T, C]
    const void* halo;   // [N, W-1, C] in x's dtype, contiguous, or null
    const float* taps;  // [W, C]
};

struct ConvGradients {
    ConstRows dy;   // [T, C]
    Rows dx;        // [T, C]
    float* d_halo;  // [N, W-1, C] or null; empty segments are left alone
    float* d_taps;  // [W, C], of this block of tokens alone
    float* ring;    // [W, kConvChannels], scratch of this thread
};

struct ConvBlock {
    Range tokens;
    Range channels;              // at most kConvChannels
    std::int64_t first_segment;  // the one of the first token, or an empty one before it
};

struct ConvKernels {
    void (*forward)(const ConvInputs& inputs, const Rows& y, const ConvBlock& block);
    void (*backward)(const ConvInputs& inputs,
                     const ConvGradients& gradients,
                     const ConvBlock& block);
};

}  // namespace hybridcp
