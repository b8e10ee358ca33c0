#pragma once

// Gated DeltaNet forward (docs/gdn-cuda.md): a cluster of two blocks walks the chunks of one piece
// and value head. Each block has a half of V's columns; K and Q are loaded once for both, and the
// blocks take turns with what does not depend on the state: chunk i's X and Y come from block i mod
// 2. Launch: clusters of 2, kThreads, kSharedBytes, and as many clusters as num_pieces times value
// heads (kSummary with transitions: twice that).

#include "kernels/gdn/cuda/forward_auxiliary.cuh"
#include "kernels/gdn/cuda/forward_layout.cuh"
#include "kernels/gdn/cuda/forward_output.cuh"
#include "kernels/gdn/cuda/forward_producer.cuh"
#include "kernels/gdn/cuda/forward_state.cuh"
#include "kernels/gdn/cuda/pieces.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

template <class Config>
HCP_DEVICE void init_forward_barriers(const ForwardShared<Config>& shared) {
    const auto init = [&](int first, int count, uint32_t arrivals) {
        for (int i = 0; i < count; ++i) {
            device::mbarrier_init(shared.barrier(first + i), arrivals);
        }
    };
    constexpr uint32_t kStateWarps = 4;
    constexpr uint32_t kAuxiliaryWarps = Config::kOutput ? 8 : 4;  // that work on a chunk
    const auto warps = [](uint32_t count) { return device::warp_arrivals(count); };
    init(Config::kKeyFull, Config::kKeys, warps(1));
    init(Config::kKeyEmpty, Config::kKeys, warps(2 * kStateWarps + kAuxiliaryWarps));
    init(Config::kQueryFull, Config::kQueries, warps(1));
    init(Config::kQueryEmpty, Config::kQueries, warps(2 * kStateWarps + 4));
    init(Config::kValueFull, Config::kValues, warps(1));
    init(Config::kValueEmpty, Config::kValues, warps(kStateWarps));
    init(Config::kUpdateEmpty, Config::kUpdatesFree, warps(2 * kStateWarps));
    init(Config::kGateFull, Config::kGates, warps(1));
    for (int i = 0; i < Config::kUpdates; ++i) {
        init(Config::kUpdateFull + i, 1, shared.owns(i) ? warps(kAuxiliaryWarps) : 1);
    }
    for (int i = 0; i < Config::kGates; ++i) {
        init(Config::kGateEmpty + i, 1,
             warps(kStateWarps + (shared.owns(i) ? kAuxiliaryWarps : 0)));
    }
    init(Config::kStagedFull, Config::kStaged, warps(4));
    init(Config::kStagedEmpty, Config::kStaged, 1);
    init(Config::kLanding, 3, 1);
    init(Config::kBetween, Config::kBarriers - Config::kBetween, 256);
    device::fence_mbarrier_init();
}

/// Blocks above the diagonal of Y are never written, those of T may be read before they are.
template <class Config>
HCP_DEVICE void zero_forward_tiles(const ForwardShared<Config>& shared) {
    const auto zero = [](uint32_t from, uint32_t bytes) {
        for (uint32_t at = device::thread_index() * 16; at < bytes; at += Config::kThreads * 16) {
            device::store_shared(from + at, device::Word4{0, 0, 0, 0});
        }
    };
    if constexpr (Config::kOutput) {
        for (int stage = 0; stage < Config::kUpdates; ++stage) {
            zero(shared.update(stage) + Config::kOutputUpdate, kPanelBytes);
        }
    }
    static_assert(InverseTiles::kBytes == Config::kInverseTilesBytes);
    zero(shared.inverse(0), Config::kKeyWarpgroups * Config::kInverseTilesBytes);
    device::fence_proxy_async();
}

/// The chunks of a run and head that forward did not keep.
HCP_DEVICE Walk remake_walk(const ForwardParams& p, int32_t item) {
    const int32_t group = p.shape.group(), heads = key_heads_of_class(p.shape) * group;
    const Run* from = p.runs + item / heads;
    const Run run = {device::load_global(&from->segment), device::load_global(&from->first_chunk),
                     device::load_global(&from->chunks), device::load_global(&from->index),
                     device::load_global(&from->head_class)};
    const int32_t first_of_class =
        (run.head_class + kHeadClasses - p.checkpoints.class_of(0)) % kHeadClasses;
    const int32_t key_head = item % heads / group * kHeadClasses + first_of_class;
    if (key_head >= p.shape.key_heads) {
        Walk none = {};
        none.from_start = true;
        return none;
    }
    const int32_t head = key_head * group + item % group;
    const Piece piece = {run.segment, run.first_chunk, run.chunks, 0, 1};
    Walk walk = walk_run(run, begin_walk(piece, p.shape, p.chunks, head), p.checkpoints);
    walk.end = walk.begin + unkept_chunks(p, walk);
    return walk;
}

template <class Config>
HCP_DEVICE Walk forward_walk(const ForwardParams& p,
                             const ForwardShared<Config>& shared,
                             bool& identity) {
    const auto item = static_cast<int32_t>(device::block_index() / Config::kCluster);
    if constexpr (Config::kRemake) {
        return remake_walk(p, item);
    }
    constexpr int32_t kKinds = Config::kSummary ? 2 : 1;  // S, M
    const int32_t head = item % p.shape.value_heads, index = item / p.shape.value_heads;
    identity = index % kKinds != 0;
    Piece piece = load_piece(p.pieces + index / kKinds);
    if (identity) {
        // Gradient summaries want M of each part, whatever the gates beyond it forget.
        piece.index = 0;
        piece.pieces = piece.chunks;
    }
    const WalkOrder order = {p.chunks, piece.first_chunk, piece.chunks, false};
    const Walk segment = begin_walk(piece, p.shape, p.chunks, head);
    if constexpr (Config::kSummary) {
        Walk walk = walk_summary(piece, segment, order, p.gates, p.summary_floor, shared.gates(0));
        if (identity && !walk.from_start) {
            walk.begin = walk.main;  // M is zero
        }
        return walk;
    } else {
        return walk_piece(piece, segment, order, p.gates, p.may_truncate, shared.gates(0));
    }
}

template <class Config>
HCP_DEVICE void forward_role(const ForwardParams& p,
                             const Walk& walk,
                             const ForwardShared<Config>& shared,
                             bool identity) {
    const uint32_t warpgroup = device::shuffle(device::warp_index() / 4, 0);
    // Broadcast, or the compiler makes the base again in each step.
    const ForwardShared<Config> kept = {device::shuffle(shared.base, 0), shared.rank};
    if (warpgroup == 0) {
        device::increase_registers<Config::kStateRegisters>();
        StateWarpgroup<Config>(p, walk, kept, identity).run();
    } else if (warpgroup == 1 + Config::kAuxiliaryWarpgroups) {
        device::decrease_registers<Config::kProducerRegisters>();
        ForwardProducer<Config>{p, walk, kept, identity}.run();
    } else if (!Config::kOutput || warpgroup == 1) {
        if constexpr (Config::kAuxiliaryRegisters > Config::kLaunchRegisters) {
            device::increase_registers<Config::kAuxiliaryRegisters>();
        }
        KeyWarpgroup<Config>(p, walk, shared, warpgroup - 1).run();
    } else if constexpr (Config::kOutput) {
        QueryWarpgroup<Config>(p, walk, kept).run();
    }
}

template <class Config>
HCP_DEVICE void forward_kernel(const ForwardParams& p) {
    const ForwardShared<Config> shared = {device::shared_base(), device::cluster_rank()};
    if constexpr (Config::kRemake) {
        device::launch_dependents();
    }
    if (device::thread_index() == 0) {
        init_forward_barriers(shared);
    }
    zero_forward_tiles(shared);
    bool identity = false;
    const Walk walk = uniform(forward_walk(p, shared, identity));
    device::sync_block();
    device::cluster_arrive();
    device::cluster_wait();
    forward_role(p, walk, shared, identity);
    device::sync_warp();
    device::cluster_arrive();  // the other block may still write here
    device::cluster_wait();
}

#ifdef __CUDACC__
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward(const __grid_constant__ ForwardParams p) {
    forward_kernel<Config>(p);
}
#endif

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
