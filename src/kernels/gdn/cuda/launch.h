#pragma once

// Host side of the Hopper kernels of Gated DeltaNet, without torch: each launch fills a kernel's
// parameters and launches it on the call's stream. All return null, or what CUDA says is wrong.

#include "kernels/gdn/cuda/runs.h"

namespace hybridcp::gdn::cuda {

struct DeviceTraits {
    int major, minor;  // compute capability
    int multiprocessors;
};
[[nodiscard]] const char* read_device_traits(int device, DeviceTraits& traits);

/// The stream of CallView that work on the device goes to (stream.cpp).
[[nodiscard]] void* current_stream(int device);

/// bf16 [tokens, heads, 128] in device memory: the last dim dense, the base a multiple of 16 bytes,
/// strides in elements and multiples of 8.
struct RowsView {
    void* data;
    int64_t token_stride, head_stride;
};

struct CallView {
    RowsView q, k, v;
    GateInputs gates;
    Shape shape;
    const Chunk* chunks;
    const Piece* pieces;  // of segments that are not empty
    int32_t num_pieces;
    bool may_truncate;  // keys have unit length, beta is in [0, 2]
    void* stream;       // cudaStream_t
    /// [value heads]: the largest magnitude of v and start states, bits of fp32; for fp16 alone.
    const uint32_t* largest;
};

/// What backward needs of forward, per head and chunk (tables.h).
struct ForwardImages {
    uint8_t* states;                // H
    RowsView errors[kErrorPlaces];  // E
    uint8_t* inverses;              // T
    uint8_t* kept;                  // [heads, chunks]: whether forward left the others
};

/// States are fp32 [segments, value heads, K, V], norms fp32 [key heads, tokens].
struct ForwardView {
    RowsView o;
    const float* start;  // null for zeros
    float* end;
    float *q_norms, *k_norms;
    Checkpoints checkpoints;  // or null
    ForwardImages images;     // of the chunks that the checkpoints' cut keeps; or null
};

/// The largest magnitude of each value head of rows of tokens and of states.
struct MagnitudesView {
    RowsView rows;
    const float* states;  // null for zeros
    uint32_t* largest;    // [value heads], bits of fp32; zeros before
};

/// The call's pieces are not used.
struct RemakeView {
    const Run* runs;
    int32_t num_runs;
    const float* start;       // null for zeros
    Checkpoints checkpoints;  // of a forward with the same runs
    ForwardImages images;     // kept: by a forward with the same runs; null: nothing
};

/// M is zero, and not walked, where gates sum to less than `floor`.
struct SummaryView {
    float *S, *M;  // [segments, value heads, K, V] and [segments, value heads, K, K]
    float floor;
};

/// Slots of parts to those of segments (joins.cuh).
struct JoinView {
    const Join* joins;
    int32_t num_joins;
    const float* transitions;  // M of all slots, [slots, heads, K, K]
    float* states;             // S or dS of all slots, [slots, heads, K, V]; null: none
    float* products;           // M again, to be joined, too; null: not
    bool backwards;            // dS
};

struct StateGradientView {
    RowsView d_o;
    const float *q_norms, *k_norms;
    const uint8_t* inverses;
    const uint32_t* largest;  // as the call's, of d_o and d_end
    const float* d_end;       // null for zeros
    float* d_start;           // or null
    uint8_t* d_states;        // null for a summary
    RowsView d_new_values;    // Z
    Progress progress;        // the same
    float summary_floor;
};

struct GradientsView {
    RowsView d_o;
    const float *q_norms, *k_norms;
    ForwardImages images;
    const uint8_t* d_states;
    Progress progress;                  // of the state gradient
    const uint32_t* largest_gradients;  // of the state gradient
    void *dq, *dk;                      // bf16, contiguous
    RowsView dv;                        // the same, and Z before
    float *dg, *dbeta;                  // [tokens, value heads], the last dim dense
    int64_t gate_token_stride;
};

/// The kernels with operands of one type (operands.cuh).
struct Launches {
    const char* (*forward)(const CallView&, const ForwardView&);
    const char* (*remake)(const CallView&, const RemakeView&);
    const char* (*summary)(const CallView&, const SummaryView&);
    const char* (*state_gradient)(const CallView&, const StateGradientView&);
    const char* (*gradients)(const CallView&, const GradientsView&);
    const char* (*magnitudes)(const CallView&, const MagnitudesView&);
    const char* (*join)(const CallView&, const JoinView&);
};
namespace bf16 {
[[nodiscard]] const Launches& launches();
}
namespace fp16 {
[[nodiscard]] const Launches& launches();
}

}  // namespace hybridcp::gdn::cuda
