#pragma once

// From the views of launch.h to the parameters and grids of the kernels; shared by the launches on
// a GPU (launch.cu) and those in the emulator of the tests.

#include "kernels/gdn/cuda/forward.cuh"
#include "kernels/gdn/cuda/gradients.cuh"
#include "kernels/gdn/cuda/launch.h"
#include "kernels/gdn/cuda/magnitudes.cuh"
#include "kernels/gdn/cuda/state_gradient.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

struct Grid {
    int64_t blocks;
    uint32_t threads, shared_bytes, cluster;
};

/// Each side has its own; returns null, or what is wrong.
const char* make_map(device::TensorMap& map, const RowsView& rows, int32_t tokens, int32_t heads);

inline const char* fill(ForwardParams& p, const CallView& call) {
    p.gates = call.gates;
    p.shape = call.shape;
    p.chunks = call.chunks;
    p.pieces = call.pieces;
    p.num_pieces = call.num_pieces;
    p.may_truncate = call.may_truncate;
    p.largest = call.largest;
    const char* error = make_map(p.k, call.k, call.shape.tokens, call.shape.key_heads);
    return error != nullptr ? error
                            : make_map(p.v, call.v, call.shape.tokens, call.shape.value_heads);
}
inline const char* fill(ForwardParams& p, const CallView& call, const ForwardView& view) {
    p.start_states = view.start;
    p.end_states = view.end;
    p.o_rows = static_cast<uint16_t*>(view.o.data);
    p.o_token_stride = view.o.token_stride;
    p.o_head_stride = view.o.head_stride;
    p.q_norms = view.q_norms;
    p.k_norms = view.k_norms;
    p.checkpoints = view.checkpoints;
    p.states = reinterpret_cast<uint16_t*>(view.states);
    p.errors = reinterpret_cast<uint16_t*>(view.errors);
    p.inverses = reinterpret_cast<uint16_t*>(view.inverses);
    const char* error = make_map(p.q, call.q, call.shape.tokens, call.shape.key_heads);
    if (error == nullptr) {
        error = make_map(p.o, view.o, call.shape.tokens, call.shape.value_heads);
    }
    return error != nullptr ? error : fill(p, call);
}
inline const char* fill(ForwardParams& p, const CallView& call, const RemakeView& view) {
    p.start_states = view.start;
    p.checkpoints = view.checkpoints;
    p.states = reinterpret_cast<uint16_t*>(view.states);
    p.errors = reinterpret_cast<uint16_t*>(view.errors);
    p.inverses = reinterpret_cast<uint16_t*>(view.inverses);
    return fill(p, call);
}
inline const char* fill(ForwardParams& p, const CallView& call, const SummaryView& view) {
    p.end_states = view.S;
    p.transitions = view.M;
    p.summary_floor = view.floor;
    return fill(p, call);
}
/// Summaries walk each piece twice, for S and for M.
template <class Config>
Grid forward_grid(const CallView& call) {
    const int64_t clusters = int64_t{call.num_pieces} * call.shape.value_heads;
    return {clusters * (Config::kSummary ? 2 : 1) * Config::kCluster, Config::kThreads,
            Config::kSharedBytes, Config::kCluster};
}

inline MagnitudesParams magnitudes_params(const CallView& call, const MagnitudesView& view) {
    return {.rows = static_cast<const uint16_t*>(view.rows.data),
            .token_stride = view.rows.token_stride,
            .head_stride = view.rows.head_stride,
            .states = view.states,
            .shape = call.shape,
            .chunks = call.chunks,
            .pieces = call.pieces,
            .num_pieces = call.num_pieces,
            .largest = view.largest};
}
inline Grid magnitudes_grid(const MagnitudesParams& p) {
    return {Magnitudes::blocks(p), Magnitudes::kThreads, 0, 1};
}

inline const char* fill(StateGradientParams& p,
                        const CallView& call,
                        const StateGradientView& view) {
    p.gates = call.gates;
    p.shape = call.shape;
    p.chunks = call.chunks;
    p.pieces = call.pieces;
    p.q_norms = view.q_norms;
    p.k_norms = view.k_norms;
    p.inverses = view.inverses;
    p.largest = view.largest;
    p.d_end = view.d_end;
    p.d_start = view.d_start;
    p.d_states = view.d_states;
    p.d_new_values = view.d_new_values;
    p.may_truncate = call.may_truncate;
    p.summary_floor = view.summary_floor;
    const char* error = make_map(p.q, call.q, call.shape.tokens, call.shape.key_heads);
    if (error == nullptr) {
        error = make_map(p.k, call.k, call.shape.tokens, call.shape.key_heads);
    }
    return error != nullptr ? error
                            : make_map(p.d_o, view.d_o, call.shape.tokens, call.shape.value_heads);
}
inline Grid state_gradient_grid(const CallView& call) {
    using Layout = StateGradientLayout;
    return {int64_t{call.num_pieces} * call.shape.value_heads * Layout::kCluster, Layout::kThreads,
            Layout::kSharedBytes, Layout::kCluster};
}

inline const char* fill(GradientsParams& p, const CallView& call, const GradientsView& view) {
    p.gates = call.gates;
    p.shape = call.shape;
    p.has_d_o = true;
    p.r_q = view.q_norms;
    p.r_k = view.k_norms;
    p.chunks = call.chunks;
    p.e = view.errors;
    p.z = view.d_new_values;
    p.inverse = view.inverses;
    p.state = view.states;
    p.state_gradient = view.d_states;
    p.largest = call.largest;
    p.largest_gradients = view.largest_gradients;
    p.dq = static_cast<uint16_t*>(view.dq);
    p.dk = static_cast<uint16_t*>(view.dk);
    p.dv = static_cast<uint16_t*>(view.dv);
    p.dg = view.dg;
    p.dbeta = view.dbeta;
    p.dg_token_stride = p.dbeta_token_stride = view.gate_token_stride;
    p.dg_head_stride = p.dbeta_head_stride = 1;
    const char* error = make_map(p.q, call.q, call.shape.tokens, call.shape.key_heads);
    if (error == nullptr) {
        error = make_map(p.k, call.k, call.shape.tokens, call.shape.key_heads);
    }
    if (error == nullptr) {
        error = make_map(p.d_o, view.d_o, call.shape.tokens, call.shape.value_heads);
    }
    const int32_t part = call.shape.value_heads_in_memory;
    const int64_t heads_in_memory = part > 0 ? part : call.shape.value_heads;
    const RowsView dv = {view.dv, heads_in_memory * kHeadDim, kHeadDim};
    return error != nullptr ? error
                            : make_map(p.dv_map, dv, call.shape.tokens, call.shape.value_heads);
}
/// A block for each multiprocessor, or for each item if they are fewer.
inline Grid gradients_grid(const CallView& call, int64_t multiprocessors) {
    const int64_t items = int64_t{call.shape.num_chunks} * call.shape.key_heads;
    return {items < multiprocessors ? items : multiprocessors, GradientsConfig::kThreads,
            GradientsConfig::kSharedBytes, 1};
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
