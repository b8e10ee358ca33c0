// Cross-entropy of rows of logits: the loss reads them once (the maximum and the sum of
// exponentials together), the gradient once more, and may overwrite them.
#pragma once

#include "kernels/pointwise/arguments.h"

namespace hybridcp {

struct LossRows {
    Element element;
    std::int64_t vocabulary;
    ConstRows logits;             // [N, vocabulary]
    const std::int64_t* targets;  // [N]; below 0 is ignored: loss and gradient are 0
    float* loss;                  // [N]
    float* statistics;            // [N, 2] maximum, sum of exp(logit - maximum)
};

struct LossKernels {
    /// Writes loss and statistics.
    void (*loss)(const LossRows& arguments, Range rows);
    /// gradients = scale (softmax - one-hot target), from the statistics. They may be the logits.
    void (*gradient)(const LossRows& arguments, const Rows& gradients, float scale, Range rows);
};

}  // namespace hybridcp
