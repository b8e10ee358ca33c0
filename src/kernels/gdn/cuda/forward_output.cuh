#pragma once

// The second auxiliary warpgroup of the forward kernel (kOutput): Q K^T and Y of the block's own
// chunks.

#include "kernels/gdn/cuda/forward_tokens.cuh"
#include "kernels/gdn/cuda/inverse.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

template <class Config>
struct QueryWarpgroup {
    const ForwardParams& p;
    const Walk& walk;
    const ForwardShared<Config>& shared;
    TokenLane at;
    InverseTiles tiles;
    float* norms;  // where this block leaves r_q, by tokens; null where it need not

    float qk[32];
    // P, the first operand of Y: blocks before the warp's own (garbage from there on), and its own.
    uint32_t far[3][4], own[4];

    HCP_DEVICE QueryWarpgroup(const ForwardParams& params,
                              const Walk& its_walk,
                              const ForwardShared<Config>& its_shared)
        : p(params),
          walk(its_walk),
          shared(its_shared),
          tiles{its_shared.inverse(0)},
          norms(norms_of(params.q_norms, its_walk, params.shape)) {}

    /// r_q of the lane's two rows. Lanes 2 i and 2 i + 1 sum half a row each, with few
    /// instructions: all loops together should fit the instruction cache, and the tensor cores are
    /// busy.
    HCP_DEVICE void make_norms(float (&r)[2], uint32_t queries) {
        r[0] = r[1] = 1.0F;
        if (!p.shape.use_qk_l2norm) {
            return;
        }
        const uint32_t half = at.lane & 1, row = 16 * at.warp + at.lane / 2;
        const uint32_t from = queries + half * kPanelBytes + 128 * row;
        const uint32_t first = (row & 7) ^ (4 * half);  // against bank conflicts
        float even = 0.0F, odd = 0.0F;
#pragma unroll 2
        for (uint32_t k = 0; k < 8; ++k) {
            const auto words = device::load_shared<device::Word4>(from + 16 * (first ^ k));
            const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const device::Float2 value = device::unpack_bf16(word[x]);
                even += value.x * value.x;
                odd += value.y * value.y;
            }
        }
        float sum = even + odd;
        sum += device::shuffle_xor(sum, 1);
        r[0] = device::shuffle(sum, 2 * at.group);
        r[1] = device::shuffle(sum, 2 * at.group + 16);
        r[0] = device::rsqrt_approximate(r[0] + kNormEpsilon);
        r[1] = device::rsqrt_approximate(r[1] + kNormEpsilon);
    }

    /// P = s (r_q Q)(r_k K)^T o Gam
    HCP_DEVICE void make_probabilities(const TokenDecays& decays, const float (&r)[2]) {
        const uint32_t factors = shared.norms(0) + 8 * at.pair;
        const float row[2] = {p.shape.scale * r[0], p.shape.scale * r[1]};
        const float decayed[2] = {row[0] * decays.row[0], row[1] * decays.row[1]};
#pragma unroll
        for (uint32_t t = 0; t < 6; ++t) {
            const float* x = qk + 4 * t;
            const auto norm = device::load_shared<device::Float2>(factors + 32 * t);
            const device::Float2 c = {norm.x * decays.column[t].x, norm.y * decays.column[t].y};
            uint32_t* to = &far[t / 2][2 * (t & 1)];
            to[0] = device::pack_f16(x[0] * c.x * decayed[0], x[1] * c.y * decayed[0]);
            to[1] = device::pack_f16(x[2] * c.x * decayed[1], x[3] * c.y * decayed[1]);
        }
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t) {
            const auto c = device::load_shared<device::Float2>(factors + 64 * at.warp + 32 * t);
            float x[4];
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                const float* from = qk + 4 * t + e;
                x[e] = at.of_warp(from[0], from[8], from[16], from[24]) * decays.own[4 * t + e];
            }
            own[2 * t] = device::pack_f16(x[0] * c.x * row[0], x[1] * c.y * row[0]);
            own[2 * t + 1] = device::pack_f16(x[2] * c.x * row[1], x[3] * c.y * row[1]);
        }
        device::sync_warp();
    }

    /// y += a block of P times block row k of T, up to the diagonal.
    template <uint32_t Blocks>
    HCP_DEVICE void multiply_row(float (&y)[8][4], const uint32_t (&a)[4], uint32_t k) {
        uint32_t t[Blocks][4];
#pragma unroll
        for (uint32_t j = 0; j < Blocks; ++j) {
            if (j <= k) {
                device::load_matrix_transposed(t[j], tiles.block_at(k, j));
            }
        }
#pragma unroll
        for (uint32_t j = 0; j < Blocks; ++j) {
            if (j <= k) {
                device::mma_f16(y[2 * j], a, {t[j][0], t[j][2]});
                device::mma_f16(y[2 * j + 1], a, {t[j][1], t[j][3]});
            }
        }
    }
    /// Y = P T, blocks up to the diagonal.
    HCP_DEVICE void multiply(float (&y)[8][4]) {
#pragma unroll
        for (uint32_t j = 0; j < 8; ++j) {
            y[j][0] = y[j][1] = y[j][2] = y[j][3] = 0.0F;
        }
        if (at.warp > 0) {
            multiply_row<1>(y, far[0], 0);
        }
        if (at.warp > 1) {
            multiply_row<2>(y, far[1], 1);
        }
        if (at.warp > 2) {
            multiply_row<3>(y, far[2], 2);
        }
        multiply_row<4>(y, own, at.warp);
    }
    HCP_DEVICE void write_y(const float (&y)[8][4], const float (&output_factor)[2], int i) {
        const uint32_t tile = shared.update(i) + Config::kOutputUpdate;
        const uint32_t row = 16 * at.warp + (at.lane & 15), right = 16 * (at.lane >> 4);
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
            if (j <= at.warp) {
                const float* a = y[2 * j];
                const float* b = y[2 * j + 1];
                const uint32_t words[4] = {pack_operand(a[0], a[1]), pack_operand(a[2], a[3]),
                                           pack_operand(b[0], b[1]), pack_operand(b[2], b[3])};
                device::store_matrix(tile + device::swizzle_128(row * 128 + 32 * j + right), words);
            }
        }
        if (at.diagonal) {
            device::store_shared(tile + kPanelBytes + 4 * at.first_row, output_factor[0]);
            device::store_shared(tile + kPanelBytes + 4 * at.first_row + 32, output_factor[1]);
        }
        device::fence_proxy_async();
        device::sync_warp();
    }

    /// A chunk without output: only keeps the barriers in step.
    HCP_DEVICE void skip(int i) {
        shared.template wait_full<Config::kKeyFull, Config::kKeys>(i);
        shared.template wait_full<Config::kGateFull, Config::kGates>(i);
        wait_stage(i);
        device::sync_warp();
        release(i);
        arrive_full(i);
    }
    HCP_DEVICE void wait_stage(int i) {
        if (i >= Config::kUpdates) {
            shared.template wait_full<Config::kUpdateEmpty, Config::kUpdatesFree>(i -
                                                                                  Config::kUpdates);
        }
    }
    HCP_DEVICE void release(int i) {
        if (device::arrives_for_warp()) {
            arrive_at_both(shared.template barrier<Config::kKeyEmpty, Config::kKeys>(i));
            device::mbarrier_arrive(shared.template barrier<Config::kGateEmpty, Config::kGates>(i));
        }
    }
    HCP_DEVICE void arrive_full(int i) {
        if (device::arrives_for_warp()) {
            device::mbarrier_arrive(
                shared.template barrier<Config::kUpdateFull, Config::kUpdates>(i));
        }
    }

    HCP_DEVICE void step(int i) {
        const int m = i - walk.catch_up();
        shared.template wait_full<Config::kKeyFull, Config::kKeys>(i);
        shared.wait_queries_full(i, m);
        issue_tokens(qk, shared.queries(i), shared.keys(i));
        float r[2], output_factor[2];
        make_norms(r, shared.queries(i));
        shared.template wait_full<Config::kGateFull, Config::kGates>(i);
        TokenDecays decays;
        decays.load(shared.gates(i), at);
        make_output_factors(r, output_factor, i);
        device::wgmma_wait<0>();
        device::keep_registers(qk);
        wait_between(shared, kNormsReady, own_use(walk, i));
        make_probabilities(decays, r);
        release(i);
        if (device::arrives_for_warp()) {
            arrive_at_both(shared.template barrier<Config::kQueryEmpty, Config::kQueries>(i));
        }
        wait_between(shared, kInverseReady, own_use(walk, i));
        float y[8][4];
        multiply(y);
        arrive_between(shared, kInverseRead);
        wait_stage(i);
        write_y(y, output_factor, i);
        arrive_full(i);
        device::barrier_sync(kQueryBarrier, 128);
        if (device::thread_index() % 128 == 0) {
            send(shared, i, Config::kOutputUpdate, Config::kOutputUpdateBytes);
        }
        store_norms(norms, walk.chunk(i), at, r);
    }
    /// s gamma r_q of the lane's rows.
    HCP_DEVICE void make_output_factors(const float (&r)[2], float (&output_factor)[2], int i) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t token = at.first_row + 8 * half;
            const auto gamma =
                device::load_shared<float>(shared.gates(i) + 4 * (kGammaField + token));
            output_factor[half] = p.shape.scale * gamma * r[half];
        }
    }

    HCP_DEVICE void run() {
        int i = static_cast<int>(shared.rank);
        for (; i < walk.catch_up(); i += 2) {
            skip(i);
        }
        for (; i < walk.count(); i += 2) {
            step(i);
        }
    }
};

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
