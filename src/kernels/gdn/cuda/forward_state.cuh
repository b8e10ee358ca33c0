#pragma once

// The state warpgroup of the forward kernel: the chain from chunk to chunk for 64 columns of V.

#include "kernels/gdn/cuda/forward_layout.cuh"
#include "kernels/gdn/cuda/pieces.cuh"
#include "kernels/gdn/cuda/state_registers.cuh"

namespace hybridcp::gdn::cuda {

template <class Config>
struct StateWarpgroup {
    const ForwardParams& p;
    const Walk& walk;
    const ForwardShared<Config>& shared;
    bool identity;  // kSummary: starts from the identity
    uint32_t warp, lane, pair;
    uint32_t tile_row;  // where this lane's matrices lie in a tile of tokens x V

    StateRegisters state;
    float u[32], o[32];  // K H and O, V rows x tokens
    uint32_t v[4][4], packed_o[4][4];
    device::Float2 beta[8];
    float decay;  // e^B

    HCP_DEVICE StateWarpgroup(const ForwardParams& params,
                              const Walk& its_walk,
                              const ForwardShared<Config>& its_shared,
                              bool from_identity)
        : p(params), walk(its_walk), shared(its_shared), identity(from_identity) {
        warp = device::shuffle(device::warp_index() % 4, 0);
        lane = device::lane_index();
        pair = lane & 3;
        const uint32_t row = lane & 7, matrix = lane >> 3;
        tile_row = ((matrix >> 1) * 8 + row) * 128 + ((2 * warp + (matrix & 1)) ^ row) * 16;
    }

    HCP_DEVICE int64_t states_at() const { return p.shape.state_offset(walk.segment, walk.head); }

    HCP_DEVICE void start() {
        const bool given = walk.from_start && p.start_states != nullptr && !Config::kSummary;
        const bool one = Config::kSummary && identity && walk.from_start;
        const float* from = p.start_states + (given ? states_at() : 0);
#pragma unroll
        for (int j = 0; j < 64; ++j) {
            const int64_t at = StateRegisters::place(j, 64 * shared.rank);
            state.h[j] = one && at / kHeadDim == at % kHeadDim ? 1.0F : 0.0F;
            if (given) {
                state.h[j] = device::load_global(from + at);
            }
        }
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            u[j] = o[j] = 0.0F;
        }
        state.pack();
    }
    HCP_DEVICE void issue_keys(int i) {
        shared.template wait_full<Config::kKeyFull, Config::kKeys>(i);
        state.issue_rows(u, shared.keys(i));
    }
    HCP_DEVICE void issue_update(int i) {
        state.issue_update(shared.update(i));
        if (!Config::kRemake || i < walk.catch_up()) {
            // Not right after the loads of V: the arrival can overtake them.
            arrive(Config::kValueEmpty + i % Config::kValues);
        }
        arrive(Config::kGateEmpty + i % Config::kGates);
    }
    HCP_DEVICE void arrive(int barrier) {
        if (lane == 0) {
            device::mbarrier_arrive(shared.barrier(barrier));
        }
    }

    /// beta, e^B and V, ahead of the wait for K H.
    HCP_DEVICE void load_inputs(int i) {
        shared.template wait_full<Config::kGateFull, Config::kGates>(i);
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            beta[t] = device::load_shared<device::Float2>(shared.gates(i) + 4 * kBetaField +
                                                          32 * t + 8 * pair);
        }
        decay = device::load_shared<float>(shared.gates(i) + 4 * kDecayField);
        shared.template wait_full<Config::kValueFull, Config::kValues>(i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            device::load_matrix_transposed(v[j], shared.values(i) + tile_row + j * 2048);
        }
    }
    /// Waits for X and Y, and expects the next ones that the other block sends.
    HCP_DEVICE void wait_update(int i) {
        shared.template wait_full<Config::kUpdateFull, Config::kUpdates>(i);
        if (!shared.owns(i)) {
            expect_update(i + 2);
        }
    }
    HCP_DEVICE void expect_update(int i) {
        if (device::thread_index() == 0 && i < walk.count()) {
            const bool with_output = Config::kOutput && i >= walk.catch_up();
            device::mbarrier_arrive_expect(
                shared.barrier(Config::kUpdateFull + i % Config::kUpdates),
                Config::kStateUpdateBytes + (with_output ? Config::kOutputUpdateBytes : 0));
        }
    }
    /// E = V - gamma r_k (K H), R = beta E; E stays in v.
    HCP_DEVICE void make_r(int i) {
        const uint32_t factors = shared.update(i) + Config::kTileBytes + 8 * pair;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int t = 2 * j + (x >> 1);
                const auto factor = device::load_shared<device::Float2>(factors + 32 * t);
                const device::Float2 value = device::unpack_bf16(v[j][x]);
                const float e0 = value.x - factor.x * u[8 * j + 2 * x];
                const float e1 = value.y - factor.y * u[8 * j + 2 * x + 1];
                state.r[j][x] = device::pack_bf16(beta[t].x * e0, beta[t].y * e1);
                if constexpr (Config::kRemake) {
                    v[j][x] = device::pack_bf16(e0, e1);
                }
            }
        }
    }
    HCP_DEVICE void release_update(int i) {
        if (lane == 0) {
            const uint32_t free = shared.barrier(Config::kUpdateEmpty + i % Config::kUpdatesFree);
            device::mbarrier_arrive_cluster(device::map_shared(free, i & 1));
        }
    }
    HCP_DEVICE void release_keys(int i) {
        if (lane == 0) {
            arrive_at_both(shared.barrier(Config::kKeyEmpty + i % Config::kKeys));
        }
    }

    /// A chunk whose output nobody needs; kRemake: `Save` leaves E and the state before it.
    template <bool Save>
    HCP_DEVICE void state_step(int i) {
        issue_keys(i);
        load_inputs(i);
        device::wgmma_wait<0>();
        device::keep_registers(u);
        release_keys(i);
        state.scale(decay);
        wait_update(i);
        make_r(i);
        issue_update(i);
        if constexpr (Save) {
            save(i);
        }
        device::wgmma_wait<0>();
        device::keep_registers(state.h);
        state.keep_r();
        state.keep_packed();
        release_update(i);
        state.pack();
    }
    HCP_DEVICE void save(int i) {
        const int m = i - walk.catch_up();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            device::store_matrix_transposed(shared.values(i) + tile_row + j * 2048, v[j]);
        }
        wait_staged(m);
        state.store_packed(shared.staged(m));
        hand_over_staged(m);
    }
    HCP_DEVICE void wait_staged(int m) {
        device::mbarrier_wait(shared.barrier(Config::kStagedEmpty + m % Config::kStaged),
                              (m / Config::kStaged & 1) ^ 1);
    }
    HCP_DEVICE void hand_over_staged(int m) {
        device::fence_proxy_async();
        device::sync_warp();
        arrive(Config::kStagedFull + m % Config::kStaged);
    }

    /// A chunk with output. What it leaves in packed_o is staged in the next step, behind products.
    HCP_DEVICE void output_step(int i) {
        const int m = i - walk.catch_up();
        issue_keys(i);
        load_inputs(i);
        device::wgmma_wait<0>();
        device::keep_registers(u);
        release_keys(i);  // early: the other warpgroups are up to a ring of keys ahead
        state.scale(decay);
        wait_update(i);
        make_r(i);
        shared.wait_queries_full(i, m);
        issue_update(i);
        state.issue_rows(o, shared.queries(i));
        if (m > 0) {
            stage_output(m - 1);
        }
        device::wgmma_wait<0>();
        device::keep_registers(o);
        device::keep_registers(state.h);
        state.keep_packed();
        scale_output(i);
        state.issue_output(o, shared.update(i) + Config::kOutputUpdate);
        release_queries(i);
        state.pack();
        // Nothing may be in flight at the end: the compiler would serialise all products.
        device::wgmma_wait<0>();
        device::keep_registers(o);
        state.keep_r();
        pack_output();
        release_update(i);
    }
    HCP_DEVICE void scale_output(int i) {
        const uint32_t factors = shared.update(i) + Config::kOutputUpdate + kPanelBytes + 8 * pair;
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            const auto factor = device::load_shared<device::Float2>(factors + 32 * t);
            o[4 * t] *= factor.x;
            o[4 * t + 1] *= factor.y;
            o[4 * t + 2] *= factor.x;
            o[4 * t + 3] *= factor.y;
        }
    }
    HCP_DEVICE void release_queries(int i) {
        if (lane == 0) {
            arrive_at_both(shared.barrier(Config::kQueryEmpty + i % Config::kQueries));
        }
    }
    HCP_DEVICE void pack_output() {
#pragma unroll
        for (int t = 0; t < 16; ++t) {
            packed_o[t / 4][t % 4] = device::pack_bf16(o[2 * t], o[2 * t + 1]);
        }
    }
    HCP_DEVICE void stage_output(int m) {
        wait_staged(m);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            device::store_matrix_transposed(shared.staged(m) + tile_row + j * 2048, packed_o[j]);
        }
        hand_over_staged(m);
    }

    HCP_DEVICE void finish() {
        float* to = Config::kSummary && identity ? p.transitions : p.end_states;
        if (!walk.to_end || to == nullptr || Config::kRemake) {
            return;
        }
#pragma unroll
        for (int j = 0; j < 64; ++j) {
            device::store_global(to + states_at() + StateRegisters::place(j, 64 * shared.rank),
                                 state.h[j]);
        }
    }

    HCP_DEVICE void run() {
        start();
        expect_update(shared.owns(0) ? 1 : 0);
        int i = 0;
        for (; i < walk.catch_up(); ++i) {
            state_step<false>(i);
        }
        for (; i < walk.count(); ++i) {
            if constexpr (Config::kOutput) {
                output_step(i);
            } else {
                state_step<Config::kRemake>(i);
            }
        }
        if constexpr (Config::kOutput) {
            if (walk.count() > walk.catch_up()) {
                stage_output(walk.count() - walk.catch_up() - 1);
            }
        }
        finish();
    }
};

}  // namespace hybridcp::gdn::cuda
