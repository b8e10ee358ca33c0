#pragma once

// Runs of chunks that backward makes again at once, and the states that they begin with.

#include "kernels/gdn/cuda/tables.h"

namespace hybridcp::gdn::cuda {

/// For backward a segment is cut into runs of chunks that are walked at once, `length` each but the
/// first and the last. Forward may keep what backward needs of the last chunks of each. Key heads
/// of four classes, by their number, then begin a quarter of a run apart: what they keep goes to
/// memory at different times. The value heads of one stay together: they read its K.
constexpr int32_t kHeadClasses = 4;
struct RunCut {
    int32_t length, kept;

    HCP_DEVICE int32_t shift(int32_t head_class) const {
        return kept == 0 ? 0 : head_class * (length / kHeadClasses);
    }
    HCP_DEVICE int32_t start(int32_t run, int32_t head_class) const {
        return run == 0 ? 0 : run * length - shift(head_class);
    }
    /// The first run that starts at `chunk` or after it.
    HCP_DEVICE int32_t run_from(int32_t chunk, int32_t head_class) const {
        return chunk == 0 ? 0 : (chunk + shift(head_class) + length - 1) / length;
    }
    /// Whether a chunk is one of the last of its run.
    HCP_DEVICE bool keeps(int32_t chunk, int32_t head_class) const {
        return (chunk + shift(head_class)) % length >= length - kept;
    }
};
/// At most, of a class.
HCP_DEVICE constexpr int32_t key_heads_of_class(const Shape& shape) {
    return (shape.key_heads + kHeadClasses - 1) / kHeadClasses;
}
/// A run of the heads of a class.
struct Run {
    int32_t segment, first_chunk, chunks;  // of the segment
    int32_t index, head_class;
};
/// Forward leaves the state before each run but a segment's first, its checkpoint: fp32 as a
/// warpgroup holds it, for both halves of V's columns and 16 times, four floats of each of 128
/// threads; that of a head is at (head * of_head + index) * kCheckpointFloats.
constexpr int kCheckpointFloats = kHeadDim * kHeadDim;
struct Checkpoints {
    RunCut cut;
    const int32_t* first;  // [segments]: that of a segment's second run
    float* data;           // or null
    int32_t of_head;
    int32_t first_key_head;  // of a launch, among those of all: for the classes

    HCP_DEVICE int32_t class_of(int32_t key_head) const {
        return (first_key_head + key_head) % kHeadClasses;
    }
};

}  // namespace hybridcp::gdn::cuda
