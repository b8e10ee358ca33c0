// The fused Gated DeltaNet kernels as plain C++: pointers and sizes in, no tensors. One table of
// functions per instruction set (kernels/simd/dispatch.h); fused.cpp is their only caller. Every
// function works on one key head of one segment with all its value heads, so that what they share
// is made once; columns of V may be split further. docs/fused-gdn.md says how it works.
#pragma once

#include <cstdint>

#include "kernels/simd/dispatch.h"

namespace hybridcp {

/// Elements [t, h, d] of a tensor at data + t * token_stride + h * head_stride + d, in elements.
struct GdnView {
    void* data = nullptr;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;
};

/// What all calls of one problem share.
struct GdnProblemView {
    GdnView q, k, v;     // fp32 or bf16 [T, H, dim]
    GdnView g, beta;     // fp32 [T, Hv]
    std::int64_t group;  // value heads that read one key head
    int key_dim, value_dim;
    float scale;  // of q
    bool use_qk_l2norm;
};

/// One segment's tokens for one key head and a range of value columns; the walk is over chunks
/// counted from the segment's start.
struct GdnTask {
    std::int64_t key_head = 0;
    std::int64_t token_begin = 0, token_end = 0;
    int column_begin = 0, column_end = 0;  // of V
    /// States [K, V] fp32 of value head i of the group at start + i * state_stride (all columns,
    /// of which the task's are read and written); null for zeros.
    const float* start = nullptr;
    float* end = nullptr;
    std::int64_t state_stride = 0;
    /// What forward keeps of each chunk's keys, GdnKernels::key_record_floats a chunk: it is
    /// written, or where `key_records_made` read; null for neither.
    float* key_records = nullptr;
    bool key_records_made = false;
};

struct GdnForwardTask {
    GdnTask task;
    GdnView o = {};                // [T, Hv, V] in v's type
    GdnView new_values = {};       // fp32 [T, Hv, V]: D of docs/kernels.md, for backward
    float* checkpoints = nullptr;  // states at every kCheckpointTokens but the first, [n, Hv, K, V]
    std::int64_t checkpoint_stride = 0;  // from one to the next
};

/// S and M of the last chunks of a segment, per value head of the group.
struct GdnSummaryTask {
    GdnTask task;          // end: S
    float* map = nullptr;  // M [K, K] fp32 of head i at map + i * map_stride
    std::int64_t map_stride = 0;
    const std::int64_t* first_chunks = nullptr;  // where each head's walk starts
    const bool* has_map = nullptr;               // heads whose M is computed; others are left alone
};

/// What the walk of the state's gradient leaves of each chunk, fp32, for value head i at
/// data + i * head_stride: the gradient of the state behind the chunk, dH', as the kernels keep
/// states; then e^{B-b} K dH' and dR of docs/kernels.md, [C, V]. K and V are whole panels.
struct GdnGradientRecords {
    float* data = nullptr;
    std::int64_t chunk_stride = 0, head_stride = 0;
};

struct GdnBackwardTask {
    GdnTask task;      // start: states as in forward; end: gradients of the start states
    GdnView d_o = {};  // [T, Hv, V] in v's type, data null for zeros
    const float* d_end = nullptr;  // gradients of the end states, strides as the states
    /// Where the walk of the state's gradient has been: dv and task.end are done, and of d_end
    /// counts whether it is null.
    GdnGradientRecords records = {};
    const float* checkpoints = nullptr;  // as forward wrote them
    std::int64_t checkpoint_stride = 0;
    GdnView new_values = {};
    GdnView dq = {}, dk = {}, dv = {};  // as q, k, v
    GdnView dg = {}, dbeta = {};        // fp32 [T, Hv]
};

/// The gradient of the state alone, over the first chunks of a segment.
struct GdnStateGradientTask {
    GdnTask task;      // end: gradients of the start states
    GdnView d_o = {};  // as in GdnBackwardTask
    const float* d_end = nullptr;
    const std::int64_t* chunk_counts = nullptr;  // chunks that each head walks; null for all
    GdnGradientRecords records = {};             // written for backward, with dv; or neither
    GdnView dv = {};
};

struct GdnKernels {
    std::int64_t chunk_tokens;
    std::int64_t checkpoint_tokens;
    std::int64_t key_record_floats;
    /// Of a chunk and value head.
    std::int64_t (*gradient_record_floats)(const GdnProblemView& problem);
    /// Bytes of scratch, 64-byte aligned, that any of the functions needs.
    std::int64_t (*workspace_bytes)(const GdnProblemView& problem);
    void (*forward)(const GdnProblemView& problem, const GdnForwardTask& task, void* workspace);
    void (*summary)(const GdnProblemView& problem, const GdnSummaryTask& task, void* workspace);
    void (*state_gradient)(const GdnProblemView& problem,
                           const GdnStateGradientTask& task,
                           void* workspace);
    void (*backward)(const GdnProblemView& problem, const GdnBackwardTask& task, void* workspace);
    bool prefers_huge_pages;  // for what forward keeps and for results
};

/// For inputs of fp32, and of bf16.
struct GdnKernelSet {
    GdnKernels fp32, bf16;
};

HCP_DECLARE_KERNELS(GdnKernelSet, gdn_kernels)

}  // namespace hybridcp
