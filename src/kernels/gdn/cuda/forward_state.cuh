#pragma once

// The state warpgroup of the forward kernel: the chain from chunk to chunk for 64 columns of V.

#include "kernels/gdn/cuda/forward_runs.cuh"
#include "kernels/gdn/cuda/pieces.cuh"
#include "kernels/gdn/cuda/state_registers.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

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
    float decay;             // e^B
    float all_decay = 1.0F;  // of M, in summaries
    // In fp16 the state, V and R are divided by 2^exponent here.
    int exponent;

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
        if constexpr (kFp16) {
            exponent = Config::kSummary && identity ? 0 : exponent_of_values(p.largest + walk.head);
        }
        if (Config::kRemake && !walk.from_start) {
            state.load_all(SegmentRun(p, walk, 0).checkpoint(p, walk, shared.rank));
        } else {
            load_start();
        }
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            u[j] = o[j] = 0.0F;
        }
        if constexpr (kFp16) {
            state.scale(down());
        }
        state.pack();
    }
    [[nodiscard]] HCP_DEVICE float down() const {
        return kFp16 ? power_of_two_within(-exponent) : 1.0F;
    }
    [[nodiscard]] HCP_DEVICE float up() const {
        return kFp16 ? power_of_two_within(exponent) : 1.0F;
    }
    HCP_DEVICE void load_start() {
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
    }
    HCP_DEVICE void issue_keys(int i) {
        shared.template wait_full<Config::kKeyFull, Config::kKeys>(i);
        state.issue_rows(u, shared.keys(i));
    }
    HCP_DEVICE void issue_update(int i) {
        state.issue_update(shared.update(i));
        arrive(shared.template barrier<Config::kGateEmpty, Config::kGates>(i));
    }
    /// Not right after the loads of V: the arrival can overtake them.
    HCP_DEVICE void release_values(int i) {
        arrive(shared.template barrier<Config::kValueEmpty, Config::kValues>(i));
    }
    HCP_DEVICE void arrive(uint32_t barrier) {
        if (device::arrives_for_warp(lane)) {
            device::mbarrier_arrive(barrier);
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
    /// The products of the issued rows with what packing rounded off, once those are done; in o
    /// both, with Q. K and Q are operands as they are, so the state is one of 16 bits in bf16.
    template <bool kWithOutput>
    HCP_DEVICE void add_rest(int i) {
        if constexpr (kWithOutput) {
            state.issue_rows(o, shared.queries(i));
        }
        device::wgmma_wait<0>();
        device::keep_registers(u);
        device::keep_registers(o);
        state.keep_packed();
        state.pack_rest();
        state.issue_rows(u, shared.keys(i), true);
        if constexpr (kWithOutput) {
            state.issue_rows(o, shared.queries(i), true);
        }
        device::wgmma_wait<0>();
        device::keep_registers(u);
        device::keep_registers(o);
        state.keep_packed();
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
                shared.template barrier<Config::kUpdateFull, Config::kUpdates>(i),
                Config::kStateUpdateBytes + (with_output ? Config::kOutputUpdateBytes : 0));
        }
    }
    /// E = V - gamma r_k (K H), R = beta E; E stays in v.
    template <bool kKept>
    HCP_DEVICE void make_r(int i) {
        const uint32_t factors = shared.update(i) + Config::kTileBytes + 8 * pair;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int t = 2 * j + (x >> 1);
                const auto factor = device::load_shared<device::Float2>(factors + 32 * t);
                const device::Float2 value = device::unpack_bf16(v[j][x]);
                const float e0 = down() * value.x - factor.x * u[8 * j + 2 * x];
                const float e1 = down() * value.y - factor.y * u[8 * j + 2 * x + 1];
                state.r[j][x] = pack_operand(beta[t].x * e0, beta[t].y * e1);
                if constexpr (kKept) {
                    v[j][x] = pack_operand(e0, e1);
                }
            }
        }
    }
    HCP_DEVICE void release_update(int i) {
        if (device::arrives_for_warp(lane)) {
            const uint32_t free =
                shared.template barrier<Config::kUpdateEmpty, Config::kUpdatesFree>(i);
            device::mbarrier_arrive_cluster(device::map_shared(free, i & 1));
        }
    }
    HCP_DEVICE void release_keys(int i) {
        if (device::arrives_for_warp(lane)) {
            arrive_at_both(shared.template barrier<Config::kKeyEmpty, Config::kKeys>(i));
        }
    }

    /// A chunk whose output nobody needs.
    HCP_DEVICE void state_step(int i) {
        issue_keys(i);
        load_inputs(i);
        if constexpr (kFp16) {
            add_rest<false>(i);
            if constexpr (Config::kRemake) {
                save_state(i);
            }
        }
        device::wgmma_wait<0>();
        device::keep_registers(u);
        release_keys(i);
        decay_state();
        wait_update(i);
        make_r<Config::kRemake>(i);
        issue_update(i);
        if constexpr (Config::kRemake) {
            save(i);
        } else {
            release_values(i);
        }
        device::wgmma_wait<0>();
        device::keep_registers(state.h);
        state.keep_r();
        state.keep_packed();
        release_update(i);
        state.pack();
    }
    /// M is that of no decay times the decay of all, and so keeps its bits however small it
    /// becomes.
    HCP_DEVICE void decay_state() {
        if (Config::kSummary && identity) {
            all_decay *= decay;
        } else {
            state.scale(decay);
        }
    }
    HCP_DEVICE void save(int i) {
        save_errors(i);
        if constexpr (!kFp16) {
            save_state(i);
        }
        hand_over_staged(i);
    }
    /// E in the place of V.
    HCP_DEVICE void save_errors(int i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            device::store_matrix_transposed(shared.values(i) + tile_row + j * 2048, v[j]);
        }
    }
    /// In fp16 from the sums, so before they change. With outputs in the place of K, of which X was
    /// made by then; the other state warps may still read it.
    HCP_DEVICE void save_state(int i) {
        if constexpr (Config::kOutput) {
            device::barrier_sync(kStateBarrier, 128);
            state.store_image(shared.keys(i));
        } else {
            wait_staged(i);
            state.store_image(shared.staged(i));
        }
    }
    HCP_DEVICE void wait_staged(int m) {
        device::mbarrier_wait(shared.template barrier<Config::kStagedEmpty, Config::kStaged>(m),
                              shared.template parity<Config::kStaged>(m) ^ 1);
    }
    HCP_DEVICE void hand_over_staged(int m) {
        device::fence_proxy_async();
        device::sync_warp();
        arrive(shared.template barrier<Config::kStagedFull, Config::kStaged>(m));
    }

    /// A chunk with output. What it leaves in packed_o is staged in the next step, behind products.
    template <bool kKept>
    HCP_DEVICE void output_step(int i) {
        const int m = i - walk.catch_up();
        issue_keys(i);
        load_inputs(i);
        if constexpr (kFp16) {
            shared.wait_queries_full(i, m);
            add_rest<true>(i);
        }
        device::wgmma_wait<0>();
        device::keep_registers(u);
        if constexpr (!kKept) {
            release_keys(i);  // early: the other warpgroups are up to a ring of keys ahead
        }
        if constexpr (kFp16) {
            wait_update(i);
            if constexpr (kKept) {
                save_state(i);
            }
            state.scale(decay);
        } else {
            state.scale(decay);
            wait_update(i);
        }
        make_r<kKept>(i);
        shared.wait_queries_full(i, m);
        issue_update(i);
        if constexpr (!kFp16) {
            state.issue_rows(o, shared.queries(i));
        }
        stage<kKept>(i, m);
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
        if (device::arrives_for_warp(lane)) {
            arrive_at_both(shared.template barrier<Config::kQueryEmpty, Config::kQueries>(i));
        }
    }
    HCP_DEVICE void pack_output() {
#pragma unroll
        for (int t = 0; t < 16; ++t) {
            packed_o[t / 4][t % 4] = device::pack_bf16(up() * o[2 * t], up() * o[2 * t + 1]);
        }
    }
    /// Hands over, the m-th time, what chunk i keeps and the output of the chunk before it.
    template <bool kKept>
    HCP_DEVICE void stage(int i, int m) {
        wait_staged(m);
        if (m > 0) {
            stage_output();
        }
        if constexpr (!kKept) {
            release_values(i);
        } else {
            save_errors(i);
            if constexpr (!kFp16) {
                save_state(i);
            }
        }
        hand_over_staged(m);
    }
    HCP_DEVICE void stage_output() {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            device::store_matrix_transposed(shared.staged(0) + tile_row + j * 2048, packed_o[j]);
        }
    }

    HCP_DEVICE void finish() {
        float* to = Config::kSummary && identity ? p.transitions : p.end_states;
        if (!walk.to_end || to == nullptr || Config::kRemake) {
            return;
        }
#pragma unroll
        for (int j = 0; j < 64; ++j) {
            device::store_global(to + states_at() + StateRegisters::place(j, 64 * shared.rank),
                                 up() * all_decay * state.h[j]);
        }
    }

    HCP_DEVICE void run_output(int i) {
        for (int from = i; i < walk.count(); from = i + 1) {
            const SegmentRun next(p, walk, from);
            const int stop = next.begin_in(walk);
            int plain = stop;
            if constexpr (Config::kKeep) {
                const int kept = next.start - walk.begin - kept_of_run(p, walk);
                plain = device::shuffle(kept < stop ? kept : stop, 0);
            }
            for (; i < plain; ++i) {
                output_step<false>(i);
            }
            if (Config::kKeep && i < stop) [[unlikely]] {
                for (; i < stop; ++i) {
                    output_step<true>(i);
                }
            }
            if (i < walk.count()) {
                state.store_all(SegmentRun(p, walk, i).checkpoint(p, walk, shared.rank), up());
            }
        }
        if (walk.count() > walk.catch_up()) {
            const int m = walk.count() - walk.catch_up();
            wait_staged(m);
            stage_output();
            hand_over_staged(m);
        }
    }

    HCP_DEVICE void run() {
        start();
        expect_update(shared.owns(0) ? 1 : 0);
        const int without_output = Config::kOutput ? walk.catch_up() : walk.count();
        int i = 0;
        for (; i < without_output; ++i) {
            state_step(i);
        }
        if constexpr (Config::kOutput) {
            run_output(i);
        }
        finish();
    }
};

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
