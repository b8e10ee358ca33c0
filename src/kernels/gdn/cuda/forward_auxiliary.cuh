#pragma once

// The first auxiliary warpgroup of the forward kernel: K K^T, the inverse and X of every other
// chunk (the other block makes the rest), which it writes into its stage of updates and sends to
// the other block.

#include "kernels/gdn/cuda/forward_tokens.cuh"
#include "kernels/gdn/cuda/inverse.cuh"

namespace hybridcp::gdn::cuda {

template <class Config>
struct KeyWarpgroup {
    const ForwardParams& p;
    const Walk& walk;
    const ForwardShared<Config>& shared;
    TokenLane at;
    InverseTiles tiles;
    bool inverse_lent;  // the second warpgroup may still read T

    float kk[32];

    HCP_DEVICE KeyWarpgroup(const ForwardParams& params,
                            const Walk& its_walk,
                            const ForwardShared<Config>& its_shared)
        : p(params),
          walk(its_walk),
          shared(its_shared),
          tiles{its_shared.inverse()},
          inverse_lent(false) {}

    HCP_DEVICE void sync() { device::barrier_sync(kKeyBarrier, 128); }

    /// The value for this warp; registers cannot be indexed.
    HCP_DEVICE float of_warp(float w0, float w1, float w2, float w3) const {
        return at.warp < 2 ? (at.warp == 0 ? w0 : w1) : (at.warp == 2 ? w2 : w3);
    }
    /// r_k from the diagonal of K K^T, and with it two more factors a token.
    HCP_DEVICE void write_norms(int i, bool main) {
        float r[2] = {1.0F, 1.0F};
        if (p.shape.use_qk_l2norm) {
            const float even[2] = {of_warp(kk[0], kk[8], kk[16], kk[24]),
                                   of_warp(kk[6], kk[14], kk[22], kk[30])};
            const float odd[2] = {of_warp(kk[1], kk[9], kk[17], kk[25]),
                                  of_warp(kk[7], kk[15], kk[23], kk[31])};
            r[0] = device::rsqrt_approximate((at.odd ? odd[0] : even[0]) + kNormEpsilon);
            r[1] = device::rsqrt_approximate((at.odd ? odd[1] : even[1]) + kNormEpsilon);
        }
        if (!at.diagonal) {
            return;
        }
        const uint32_t gates = shared.gates(i);
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t token = at.first_row + 8 * half;
            const uint32_t to = shared.norms() + 4 * token;
            device::store_shared(to, r[half]);
            device::store_shared(
                to + 256, r[half] * device::load_shared<float>(gates + 4 * (kRestField + token)));
            device::store_shared(
                to + 512, r[half] * device::load_shared<float>(gates + 4 * (kGammaField + token)));
            if (Config::kOutput && main && p.k_norms != nullptr) {
                store_norm(p.k_norms, walk, p.shape, walk.chunk(i), token, r[half]);
            }
        }
    }

    /// diag(beta) S below the diagonal: blocks before the warp's own in fp16, its own in fp32.
    HCP_DEVICE void write_lower(const TokenDecays& decays, const float (&beta)[2]) {
        const uint32_t norms = shared.norms();
        const float row[2] = {beta[0] * device::load_shared<float>(norms + 4 * at.first_row),
                              beta[1] * device::load_shared<float>(norms + 4 * at.first_row + 32)};
        device::Float2 own[2], before[6];
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t) {
            own[t] =
                device::load_shared<device::Float2>(norms + 64 * at.warp + 32 * t + 8 * at.pair);
        }
#pragma unroll
        for (uint32_t t = 0; t < 6; ++t) {
            const auto r = device::load_shared<device::Float2>(norms + 32 * t + 8 * at.pair);
            before[t] = {r.x * decays.column[t].x, r.y * decays.column[t].y};
        }
        const float far[2] = {row[0] * decays.row[0], row[1] * decays.row[1]};
#pragma unroll
        for (uint32_t t = 0; t < 8; ++t) {
            const float* x = kk + 4 * t;
            if (t < 2 * at.warp) {
                const device::Float2 c = before[t < 6 ? t : 0];
                const uint32_t to = tiles.lower_at(at.first_row, 8 * t + 2 * at.pair);
                device::store_shared(to,
                                     device::pack_f16(x[0] * c.x * far[0], x[1] * c.y * far[0]));
                device::store_shared(to + 8 * InverseTiles::kLowerRowBytes,
                                     device::pack_f16(x[2] * c.x * far[1], x[3] * c.y * far[1]));
            } else if (t <= 2 * at.warp + 1) {
                const float* gam = decays.own + 4 * (t & 1);
                const device::Float2 c = own[t & 1];
                const uint32_t column = 8 * (t & 1) + 2 * at.pair;
                const uint32_t to = tiles.diagonal_at(at.warp, at.group, column);
                constexpr uint32_t kNext = 4 * InverseTiles::kDiagonalStride;
                device::store_shared(to, row[0] * gam[0] * c.x * x[0]);
                device::store_shared(to + kNext, row[0] * gam[1] * c.y * x[1]);
                device::store_shared(to + 32, row[1] * gam[2] * c.x * x[2]);
                device::store_shared(to + kNext + 32, row[1] * gam[3] * c.y * x[3]);
            }
        }
        device::sync_warp();
    }

    /// T^T diag(e^{B - b} r_k), rows of the warp: the first operand of X.
    HCP_DEVICE void load_x_operand(uint32_t (&a)[4][4], const device::Float2 (&factor)[8]) {
        const uint32_t row = at.lane & 7, matrix = at.lane >> 3;
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
            if (k >= at.warp) {
                device::load_matrix_transposed(a[k], tiles.at(16 * k + (matrix >> 1) * 8 + row,
                                                              16 * at.warp + (matrix & 1) * 8));
            } else {
                a[k][0] = a[k][1] = a[k][2] = a[k][3] = 0;
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
#pragma unroll
            for (uint32_t x = 0; x < 4; ++x) {
                const device::Float2 t = device::unpack_f16(a[k][x]), f = factor[2 * k + (x >> 1)];
                a[k][x] = device::pack_bf16(t.x * f.x, t.y * f.y);
            }
        }
    }
    HCP_DEVICE void issue_x(float (&x)[64], uint32_t (&a)[4][4], int i) {
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
                                                        k > 0);
        }
        device::wgmma_commit();
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
            const uint32_t words[4] = {device::pack_bf16(x[8 * j], x[8 * j + 1]),
                                       device::pack_bf16(x[8 * j + 2], x[8 * j + 3]),
                                       device::pack_bf16(x[8 * j + 4], x[8 * j + 5]),
                                       device::pack_bf16(x[8 * j + 6], x[8 * j + 7])};
            device::store_matrix(stage + (j >> 2) * kPanelBytes +
                                     device::swizzle_128(row * 128 + (32 * j & 127) + right),
                                 words);
        }
        const uint32_t token = device::thread_index() % 128;
        if (token < kChunkTokens) {
            device::store_shared(stage + Config::kTileBytes + 4 * token,
                                 device::load_shared<float>(shared.norms() + 512 + 4 * token));
        }
        device::fence_proxy_async();
        device::sync_warp();
    }
    HCP_DEVICE void hand_over(int i) {
        if (at.lane == 0) {
            device::mbarrier_arrive(shared.barrier(Config::kUpdateFull + i % Config::kUpdates));
            device::mbarrier_arrive(shared.barrier(Config::kGateEmpty + i % Config::kGates));
            arrive_at_both(shared.barrier(Config::kKeyEmpty + i % Config::kKeys));
        }
        sync();
        if (device::thread_index() % 128 == 0) {
            send(shared, i, 0, Config::kStateUpdateBytes);
        }
    }

    /// kRemake: T as problem.cuh lays it out.
    HCP_DEVICE void save_inverse(int i) {
        const int64_t tile = walk.head * int64_t{p.shape.num_chunks} + walk.global_chunk(i);
        uint16_t* to = p.inverses + tile * (kInverseBytes / 2);
#pragma unroll
        for (uint32_t n = 0; n < 4; ++n) {
            const uint32_t piece = device::thread_index() % 128 + 128 * n, row = piece / 8;
            const auto words = device::load_shared<device::Word4>(tiles.at(row, piece % 8 * 8));
            device::store_global(
                reinterpret_cast<device::Word4*>(to + device::swizzle_128(piece * 16) / 2), words);
        }
    }

    /// From K K^T to T in shared memory.
    template <bool Main>
    HCP_DEVICE void make_inverse(int i) {
        shared.template wait_full<Config::kKeyFull, Config::kKeys>(i);
        issue_tokens(kk, shared.keys(i), shared.keys(i));
        shared.template wait_full<Config::kGateFull, Config::kGates>(i);
        TokenDecays decays;
        decays.load(shared.gates(i), at);
        const uint32_t betas = shared.gates(i) + 4 * (kBetaField + at.first_row);
        const float beta[2] = {device::load_shared<float>(betas),
                               device::load_shared<float>(betas + 32)};
        device::wgmma_wait<0>();
        device::keep_registers(kk);
        if (inverse_lent) {
            device::barrier_sync(kInverseRead, 256);
            inverse_lent = false;
        }
        write_norms(i, Main);
        sync();
        if constexpr (Main && Config::kOutput) {
            device::barrier_arrive(kNormsReady, 256);
        }
        write_lower(decays, beta);
        invert_diagonal(tiles, at.warp);
        sync();
        merge_pairs(tiles, at.warp);
        sync();
        merge_halves(tiles, at.warp);
    }

    template <bool Main>
    HCP_DEVICE void step(int i) {
        make_inverse<Main>(i);
        device::Float2 factor[8];
#pragma unroll
        for (uint32_t t = 0; t < 8; ++t) {
            factor[t] =
                device::load_shared<device::Float2>(shared.norms() + 256 + 32 * t + 8 * at.pair);
        }
        sync();
        if constexpr (Main && Config::kOutput) {
            device::barrier_arrive(kInverseReady, 256);
            inverse_lent = true;
        }
        uint32_t a[4][4];
        float x[64];
        load_x_operand(a, factor);
        issue_x(x, a, i);
        if constexpr (Main && Config::kRemake) {
            save_inverse(i);
        }
        wait_stage(i);
        device::wgmma_wait<0>();
        device::keep_registers(x);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            device::keep_registers(a[k]);
        }
        write_x(x, i);
        hand_over(i);
    }

    HCP_DEVICE void run() {
        int i = static_cast<int>(shared.rank);
        for (; i < walk.catch_up(); i += 2) {
            step<false>(i);
        }
        for (; i < walk.count(); i += 2) {
            step<true>(i);
        }
        if (inverse_lent) {
            device::barrier_sync(kInverseRead, 256);
        }
    }
};

}  // namespace hybridcp::gdn::cuda
