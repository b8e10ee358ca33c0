#pragma once

// The auxiliary warpgroups of the forward kernel for what depends on K: K K^T, the inverse and X of
// every other chunk (the other block makes the rest), which they write into the block's stage of
// updates and send to the other block.

#include "kernels/gdn/cuda/forward_runs.cuh"
#include "kernels/gdn/cuda/forward_tokens.cuh"
#include "kernels/gdn/cuda/inverse.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

template <class Config>
struct KeyWarpgroup {
    const ForwardParams& p;
    const Walk& walk;
    const ForwardShared<Config>& shared;
    uint32_t index;  // of the block's key warpgroups
    TokenLane at;
    InverseTiles tiles;
    float* norms;       // where this block leaves r_k, by tokens; null where it need not
    bool inverse_lent;  // the second warpgroup may still read T

    float kk[32];
    float beta[2], rest[2], gamma[2], r[2];  // of the lane's rows: rest is e^{B - b}, r is r_k

    HCP_DEVICE KeyWarpgroup(const ForwardParams& params,
                            const Walk& its_walk,
                            const ForwardShared<Config>& its_shared,
                            uint32_t its_index)
        : p(params),
          walk(its_walk),
          shared(its_shared),
          index(Config::kKeyWarpgroups > 1 ? its_index : 0),
          tiles{its_shared.inverse(index)},
          norms(norms_of(params.k_norms, its_walk, params.shape)),
          inverse_lent(false) {}

    HCP_DEVICE void sync() { device::barrier_sync(kKeyBarrier + index, 128); }

    HCP_DEVICE void load_rows(uint32_t gates) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t from = gates + 4 * (at.first_row + 8 * half);
            beta[half] = device::load_shared<float>(from + 4 * kBetaField);
            rest[half] = device::load_shared<float>(from + 4 * kRestField);
            gamma[half] = device::load_shared<float>(from + 4 * kGammaField);
        }
    }

    /// r_k from the diagonal of K K^T, and the warp's diagonal blocks of diag(beta) S below the
    /// diagonal: those of 8 in fp32 to shared memory, what lies below the first as a fragment.
    HCP_DEVICE uint32_t write_diagonal(const TokenDecays& decays) {
        // Blocks of 8 of the warp's block of 16: its first, the one below, its last.
        const float x[6] = {
            at.of_warp(kk[0], kk[8], kk[16], kk[24]),  at.of_warp(kk[1], kk[9], kk[17], kk[25]),
            at.of_warp(kk[2], kk[10], kk[18], kk[26]), at.of_warp(kk[3], kk[11], kk[19], kk[27]),
            at.of_warp(kk[6], kk[14], kk[22], kk[30]), at.of_warp(kk[7], kk[15], kk[23], kk[31])};
        float held[2] = {1.0F, 1.0F};  // right in the lanes with the diagonal
        if (p.shape.use_qk_l2norm) {
            held[0] = device::rsqrt_approximate((at.odd ? x[1] : x[0]) + kNormEpsilon);
            held[1] = device::rsqrt_approximate((at.odd ? x[5] : x[4]) + kNormEpsilon);
        }
        if (at.diagonal) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const uint32_t to = shared.norms(index) + 4 * (at.first_row + 8 * half);
                device::store_shared(to, held[half]);
                device::store_shared(to + 256, held[half] * rest[half]);
            }
        }
        const uint32_t holder = 9 * at.pair;  // of row 2 pair
        device::Float2 column[2];
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            r[half] = device::shuffle(held[half], 4 * at.group + at.group / 2);
            column[half] = {device::shuffle(held[half], holder),
                            device::shuffle(held[half], holder + 4)};
        }
        const float row[2] = {beta[0] * r[0], beta[1] * r[1]};
        const uint32_t to = tiles.diagonal_at(at.warp, at.group, 2 * at.pair);
        constexpr uint32_t kNext = InverseTiles::kColumnBytes;
        device::store_shared(to, row[0] * decays.own[0] * column[0].x * x[0]);
        device::store_shared(to + kNext, row[0] * decays.own[1] * column[0].y * x[1]);
        device::store_shared(to + 8 * kNext, row[1] * decays.own[6] * column[1].x * x[4]);
        device::store_shared(to + 9 * kNext, row[1] * decays.own[7] * column[1].y * x[5]);
        device::sync_warp();
        return device::pack_f16(row[1] * decays.own[2] * column[0].x * x[2],
                                row[1] * decays.own[3] * column[0].y * x[3]);
    }

    /// diag(beta) S in the blocks before the warp's own.
    HCP_DEVICE void write_lower(const TokenDecays& decays) {
        const float far[2] = {beta[0] * r[0] * decays.row[0], beta[1] * r[1] * decays.row[1]};
#pragma unroll
        for (uint32_t t = 0; t < 6; ++t) {
            if (t / 2 < at.warp) {
                const auto norm =
                    device::load_shared<device::Float2>(shared.norms(index) + 32 * t + 8 * at.pair);
                const device::Float2 c = {norm.x * decays.column[t].x, norm.y * decays.column[t].y};
                const float* x = kk + 4 * t;
                const uint32_t to = tiles.lower_at(at.first_row, 8 * t + 2 * at.pair);
                device::store_shared(to,
                                     device::pack_f16(x[0] * c.x * far[0], x[1] * c.y * far[0]));
                device::store_shared(to + 8 * InverseTiles::kLowerRowBytes,
                                     device::pack_f16(x[2] * c.x * far[1], x[3] * c.y * far[1]));
            }
        }
    }

    HCP_DEVICE void issue_x(float (&x)[64], uint32_t (&a)[4][4], int i, bool add = false) {
        const uint64_t keys = device::matrix_descriptor(shared.keys(i), kPanelBytes, 1024);
        device::keep_registers(x);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            device::keep_registers(a[k]);
        }
        device::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            device::wgmma_registers<device::Major::kMn>(x, a[k], device::advance(keys, k * 2048),
                                                        add || k > 0);
        }
        device::wgmma_commit();
    }
    HCP_DEVICE static void finish_x(float (&x)[64], uint32_t (&a)[4][4]) {
        device::wgmma_wait<0>();
        device::keep_registers(x);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            device::keep_registers(a[k]);
        }
    }
    HCP_DEVICE void wait_stage(int i) {
        if (i >= Config::kUpdates) {
            shared.template wait_full<Config::kUpdateEmpty, Config::kUpdatesFree>(i -
                                                                                  Config::kUpdates);
        }
    }
    HCP_DEVICE void write_x(const float (&x)[64], int i) {
        const uint32_t row = 16 * at.warp + (at.lane & 15), right = 16 * (at.lane >> 4);
        const uint32_t stage = shared.update(i);
#pragma unroll
        for (uint32_t j = 0; j < 8; ++j) {
            const uint32_t words[4] = {
                pack_operand(x[8 * j], x[8 * j + 1]), pack_operand(x[8 * j + 2], x[8 * j + 3]),
                pack_operand(x[8 * j + 4], x[8 * j + 5]), pack_operand(x[8 * j + 6], x[8 * j + 7])};
            device::store_matrix(stage + (j >> 2) * kPanelBytes +
                                     device::swizzle_128(row * 128 + (32 * j & 127) + right),
                                 words);
        }
        if (at.pair == 0) {
            const uint32_t to = stage + Config::kTileBytes + 4 * at.first_row;
            device::store_shared(to, gamma[0] * r[0]);
            device::store_shared(to + 32, gamma[1] * r[1]);
        }
        device::fence_proxy_async();
        device::sync_warp();
    }
    template <bool kSaves>
    HCP_DEVICE void hand_over(int i) {
        const uint32_t full = shared.template barrier<Config::kUpdateFull, Config::kUpdates>(i);
        if (device::arrives_for_warp()) {
            if constexpr (!device::kRacecheck) {
                device::mbarrier_arrive(full);
            }
            device::mbarrier_arrive(shared.template barrier<Config::kGateEmpty, Config::kGates>(i));
            arrive_at_both(shared.template barrier<Config::kKeyEmpty, Config::kKeys>(i));
        }
        sync();
        if (device::thread_index() % 128 == 0) {
            send(shared, i, 0, Config::kStateUpdateBytes);
            if (kSaves && i >= walk.catch_up()) {
                save_inverse(i);
            }
        }
        if constexpr (device::kRacecheck) {  // after what the copy loads for it
            device::mbarrier_arrive(full);
        }
    }

    /// T; one thread, after the fences of all that wrote it.
    HCP_DEVICE void save_inverse(int i) {
        const int64_t tile = walk.head * int64_t{p.shape.num_chunks} + walk.global_chunk(i);
        device::bulk_store(p.inverses + tile * (kInverseBytes / 2), tiles.base, kInverseBytes);
        device::bulk_commit();
    }
    /// The chunk's T may be written: that before it has left, and the second warpgroup has read it.
    template <bool kSaves>
    HCP_DEVICE void wait_inverse_free(int i) {
        if constexpr (kSaves) {
            finish_inverse();
        }
        if (inverse_lent) {
            wait_between(shared, kInverseRead, own_use(walk, i) - 1);
        }
        if constexpr (Config::kRemake) {
            sync();
        }
    }

    /// From K K^T to T; T^T diag(e^{B - b} r_k) is the first operand of X.
    template <bool kSaves>
    HCP_DEVICE void make_inverse(uint32_t (&a)[4][4], int i, bool is_read) {
        shared.template wait_full<Config::kKeyFull, Config::kKeys>(i);
        issue_tokens(kk, shared.keys(i), shared.keys(i));
        shared.template wait_full<Config::kGateFull, Config::kGates>(i);
        TokenDecays decays;
        decays.load(shared.gates(i), at);
        load_rows(shared.gates(i));
        device::wgmma_wait<0>();
        device::keep_registers(kk);
        wait_inverse_free<kSaves>(i);
        inverse_lent = is_read;
        const uint32_t corner = write_diagonal(decays);
        if (is_read) {
            arrive_between(shared, kNormsReady);
        }
        invert_diagonal(tiles, at.warp, corner);
        sync();  // the norms
        write_lower(decays);
        sync();
        finish_column(tiles, at.warp, shared.norms(index) + 256, a);
        if (is_read) {
            arrive_between(shared, kInverseReady);
        }
    }

    template <bool kSaves>
    HCP_DEVICE void step(int i) {
        const bool main = i >= walk.catch_up();
        uint32_t a[4][4];
        make_inverse<kSaves>(a, i, Config::kOutput && main);
        float x[64];
        issue_x(x, a, i);
        if (Config::kOutput && main) {
            store_norms(norms, walk.chunk(i), at, r);
        }
        if constexpr (kFp16) {  // with what was rounded off T: K is an operand as it is
            finish_x(x, a);
            take_column_rest(tiles, at.warp, shared.norms(index) + 256, a);
            issue_x(x, a, i, true);
        }
        wait_stage(i);
        finish_x(x, a);
        write_x(x, i);
        hand_over<kSaves>(i);
    }
    /// A loop for chunks that are kept and one for the others: none is longer than it must be, for
    /// the instruction cache.
    HCP_DEVICE void run_keeping(int& i) {
        KeptChunks kept;
        while (i < walk.count()) {
            kept.go_to(p, walk, i);
            for (; i < kept.first; i += 2) {
                step<false>(i);
            }
            if (i < kept.stop) [[unlikely]] {
                for (; i < kept.stop; i += 2) {
                    step<true>(i);
                }
            }
            finish_inverse();
        }
    }
    /// The latest T has left.
    HCP_DEVICE static void finish_inverse() {
        if (device::thread_index() % 128 == 0) {
            device::bulk_wait_read<0>();
        }
    }
    HCP_DEVICE void run() {
        constexpr int kTurns = 2 * Config::kKeyWarpgroups;
        auto i = static_cast<int>(shared.rank + 2 * index);
        if constexpr (Config::kKeep) {
            run_keeping(i);
        } else {
            for (; i < walk.count(); i += kTurns) {
                step<Config::kRemake>(i);
            }
        }
        if (inverse_lent) {
            wait_between(shared, kInverseRead, own_use(walk, i) - 1);
        }
        if ((Config::kKeep || Config::kRemake) && device::thread_index() % 128 == 0) {
            device::bulk_wait<0>();
        }
    }
};

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
