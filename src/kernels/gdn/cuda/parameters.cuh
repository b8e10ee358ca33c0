#pragma once

// From the views of launch.h to the parameters and grids of the kernels; shared by the launches on
// a GPU (launch.cu) and those in the emulator of the tests.

#include "kernels/gdn/cuda/forward.cuh"
#include "kernels/gdn/cuda/gradients.cuh"
#include "kernels/gdn/cuda/joins.cuh"
#include "kernels/gdn/cuda/launch.h"
#include "kernels/gdn/cuda/magnitudes.cuh"
#include "kernels/gdn/cuda/state_gradient.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

struct Grid {
    int64_t blocks;
    uint32_t threads, shared_bytes, cluster;
};

/// Of 16-bit elements, the contiguous index first; strides are of the other two.
struct MapShape {
    void* data;
    uint64_t extent[3], stride_bytes[2];
    uint32_t box[3];
};
/// Each side has its own; returns null, or what is wrong.
const char* encode(device::TensorMap& map, const MapShape& shape);

/// [tokens, heads, 128] in panels: boxes of 64 tokens x 64 columns.
inline const char* make_map(device::TensorMap& map,
                            const RowsView& rows,
                            int32_t tokens,
                            int32_t heads) {
    const auto wide = [](int64_t x) { return static_cast<uint64_t>(x); };
    return encode(map, {.data = rows.data,
                        .extent = {kHeadDim, wide(heads), wide(tokens)},
                        .stride_bytes = {2 * wide(rows.head_stride), 2 * wide(rows.token_stride)},
                        .box = {64, 1, kChunkTokens}});
}
/// The same in tiles of both panels of a head: [64 columns, tokens, 2 x heads].
inline const char* make_tile_map(device::TensorMap& map,
                                 const RowsView& rows,
                                 int32_t tokens,
                                 int32_t heads) {
    if (rows.head_stride != kHeadDim) {
        return "the rows of heads do not adjoin";
    }
    const auto wide = [](int64_t x) { return static_cast<uint64_t>(x); };
    return encode(map, {.data = rows.data,
                        .extent = {64, wide(tokens), 2 * wide(heads)},
                        .stride_bytes = {2 * wide(rows.token_stride), kHeadDim},
                        .box = {64, kChunkTokens, 2}});
}

inline void set_rows(TokenRows& to, const RowsView& rows) {
    to.data = static_cast<uint16_t*>(rows.data);
    to.token_stride = rows.token_stride;
    to.head_stride = rows.head_stride;
}
inline const char* make_rows(TokenRows& to, const RowsView& rows, int32_t tokens, int32_t heads) {
    set_rows(to, rows);
    return make_map(to.map, rows, tokens, heads);
}
inline int32_t heads_of_place(const Shape& shape, int place) {
    return place < 2 ? shape.key_heads : shape.value_heads - 2 * shape.key_heads;
}

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
inline const char* fill(ForwardParams& p, const CallView& call, const ForwardImages& images) {
    p.states = reinterpret_cast<uint16_t*>(images.states);
    p.inverses = reinterpret_cast<uint16_t*>(images.inverses);
    p.kept = images.kept;
    const char* error = nullptr;
    for (int i = 0; i < kErrorPlaces && error == nullptr; ++i) {
        if (images.errors[i].data != nullptr) {
            error = make_rows(p.errors[i], images.errors[i], call.shape.tokens,
                              heads_of_place(call.shape, i));
        }
    }
    return error;
}
inline const char* fill(ForwardParams& p, const CallView& call, const ForwardView& view) {
    p.start_states = view.start;
    p.end_states = view.end;
    p.q_norms = view.q_norms;
    p.k_norms = view.k_norms;
    p.checkpoints = view.checkpoints;
    const char* error = make_map(p.q, call.q, call.shape.tokens, call.shape.key_heads);
    if (error == nullptr) {
        error = make_rows(p.o, view.o, call.shape.tokens, call.shape.value_heads);
    }
    if (error == nullptr) {
        error = fill(p, call, view.images);
    }
    return error != nullptr ? error : fill(p, call);
}
inline const char* fill(ForwardParams& p, const CallView& call, const RemakeView& view) {
    p.runs = view.runs;
    p.num_runs = view.num_runs;
    p.start_states = view.start;
    p.checkpoints = view.checkpoints;
    const char* error = fill(p, call, view.images);
    return error != nullptr ? error : fill(p, call);
}
inline const char* fill(ForwardParams& p, const CallView& call, const SummaryView& view) {
    p.end_states = view.S;
    p.transitions = view.M;
    p.summary_floor = view.floor;
    return fill(p, call);
}
/// Summaries walk each piece twice, for S and for M.
template <class Config>
Grid forward_grid(const ForwardParams& p) {
    const int64_t clusters =
        Config::kRemake ? int64_t{p.num_runs} * key_heads_of_class(p.shape) * p.shape.group()
                        : int64_t{p.num_pieces} * p.shape.value_heads * (Config::kSummary ? 2 : 1);
    return {clusters * Config::kCluster, Config::kThreads, Config::kSharedBytes, Config::kCluster};
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

inline Grid join_grid(const JoinParams& p) {
    return {Joining::blocks(p), Joining::kThreads, Joining::kSharedBytes, 1};
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
    p.progress = view.progress;
    p.may_truncate = call.may_truncate;
    p.summary_floor = view.summary_floor;
    const char* error = make_map(p.q, call.q, call.shape.tokens, call.shape.key_heads);
    if (error == nullptr) {
        error = make_map(p.k, call.k, call.shape.tokens, call.shape.key_heads);
    }
    if (error == nullptr && view.d_states != nullptr) {
        error =
            make_rows(p.d_new_values, view.d_new_values, call.shape.tokens, call.shape.value_heads);
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
    p.progress = view.progress;
    p.r_q = view.q_norms;
    p.r_k = view.k_norms;
    p.chunks = call.chunks;
    p.inverse = view.images.inverses;
    p.state = view.images.states;
    p.state_gradient = view.d_states;
    p.largest = call.largest;
    p.largest_gradients = view.largest_gradients;
    p.dq = static_cast<uint16_t*>(view.dq);
    p.dk = static_cast<uint16_t*>(view.dk);
    p.dg = view.dg;
    p.dbeta = view.dbeta;
    p.dg_token_stride = p.dbeta_token_stride = view.gate_token_stride;
    p.dg_head_stride = p.dbeta_head_stride = 1;
    const char* error = make_tile_map(p.q, call.q, call.shape.tokens, call.shape.key_heads);
    if (error == nullptr) {
        error = make_tile_map(p.k, call.k, call.shape.tokens, call.shape.key_heads);
    }
    if (error == nullptr) {
        error = make_tile_map(p.d_o, view.d_o, call.shape.tokens, call.shape.value_heads);
    }
    for (int i = 0; i < kErrorPlaces && error == nullptr; ++i) {
        if (view.images.errors[i].data != nullptr) {
            error = make_tile_map(p.errors[i], view.images.errors[i], call.shape.tokens,
                                  heads_of_place(call.shape, i));
        }
    }
    set_rows(p.dv, view.dv);
    return error != nullptr
               ? error
               : make_tile_map(p.dv.map, view.dv, call.shape.tokens, call.shape.value_heads);
}
/// A block for each multiprocessor, or for each item if they are fewer.
inline Grid gradients_grid(const CallView& call, int64_t multiprocessors) {
    const int64_t items = int64_t{call.shape.num_chunks} * call.shape.key_heads;
    return {items < multiprocessors ? items : multiprocessors, GradientsConfig::kThreads,
            GradientsConfig::kSharedBytes, 1};
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
