#pragma once

// The auxiliary warpgroup of the backward walk: off the chain of states it makes
//     P = s (r_q Q)(r_k K)^T o Gam      and      -W = -T diag(beta gamma r_k) K
// of every other chunk, for both blocks.

#include "kernels/gdn/cuda/state_gradient_layout.cuh"

namespace hybridcp::gdn::cuda {

class StateGradientAuxiliary {
    using Layout = StateGradientLayout;

  public:
    HCP_DEVICE StateGradientAuxiliary(const StateGradientParams& p,
                                      const StateGradientShared& shared,
                                      const StateGradientItem& item)
        : p_(p), shared_(shared), item_(item), at_(lane_place()), row_(16 * at_.warp + at_.row) {}

    HCP_DEVICE void run() {
        bring_inverse(static_cast<int32_t>(shared_.rank));
        for (auto use = static_cast<int32_t>(shared_.rank); use < item_.uses; use += 2) {
            make_products(use);
        }
    }

  private:
    /// T of a chunk of this block, when all have read that of the chunk before.
    HCP_DEVICE void bring_inverse(int32_t use) const {
        if (device::thread_index() % 128 == 0 && use < item_.uses) {
            const int64_t at = int64_t{item_.head} * p_.shape.num_chunks + item_.index_at(use);
            device::mbarrier_arrive_expect(shared_.inverse_full, kInverseBytes);
            device::bulk_load(shared_.inverse(), p_.inverses + at * kInverseBytes, kInverseBytes,
                              shared_.inverse_full);
        }
    }

    HCP_DEVICE void make_products(int32_t use) {
        float scores[32], writes[64];
        uint32_t left[4][4];
        shared_.keys_ring.wait_full(use);
        shared_.queries_ring.wait_full(use);
        device::keep_registers(scores);
        device::wgmma_fence();
        multiply_queries(scores, use);
        device::wgmma_commit();
        shared_.gates.wait_full(use);
        ScoreFactors factors;
        load_factors(factors, use);
        device::mbarrier_wait(shared_.inverse_full, (use >> 1) & 1);
        load_inverse(left, use);
        multiply_inverse(writes, left, use);
        device::wgmma_commit();
        device::barrier_sync(Layout::kAuxiliaryBarrier, 128);
        bring_inverse(use + 2);
        uint32_t packed[4][4];
        device::wgmma_wait<1>();
        device::keep_registers(scores);
        arrive_empty_at_both(shared_.queries_ring, use);
        mask_scores(packed, scores, factors);
        device::sync_warp();
        if (device::lane_index() == 0) {
            shared_.gates.arrive_empty(use);
        }
        shared_.scores_ring.wait_empty(use);
        store_scores(packed, use);
        hand_over(shared_.scores_ring, use, shared_.scores(use), kPanelBytes);
        device::wgmma_wait<0>();
        device::keep_registers(writes);
        arrive_empty_at_both(shared_.keys_ring, use);
        shared_.wait_writes_empty(use);
        store_writes(writes, use);
        hand_over(shared_.writes_ring, use, shared_.writes(use), Layout::kTileBytes);
    }

    /// To the chain here, and with a copy to that of the other block.
    HCP_DEVICE void hand_over(const Ring<Layout::kProductStages>& ring,
                              int32_t use,
                              uint32_t tile,
                              uint32_t bytes) const {
        device::fence_proxy_async();
        device::sync_warp();
        if (device::lane_index() == 0) {
            device::mbarrier_arrive(ring.full(use));
        }
        device::barrier_sync(Layout::kAuxiliaryBarrier, 128);
        if (device::thread_index() % 128 == 0) {
            const uint32_t other = shared_.rank ^ 1;
            device::bulk_copy_cluster(device::map_shared(tile, other), tile, bytes,
                                      device::map_shared(ring.full(use), other));
        }
    }

    HCP_DEVICE void multiply_queries(float (&scores)[32], int32_t use) const {
        const uint64_t keys = device::matrix_descriptor(shared_.keys(use), 16, 1024);
        const uint64_t queries = device::matrix_descriptor(shared_.queries(use), 16, 1024);
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            const uint32_t offset = kPanelBytes * (step >> 2) + 32 * (step & 3);
            device::wgmma_shared<device::Major::kK, device::Major::kK>(
                scores, device::advance(queries, offset), device::advance(keys, offset), step > 0);
        }
    }

    /// T diag(-beta gamma r_k) in bf16; blocks above the diagonal are zero.
    HCP_DEVICE void load_inverse(uint32_t (&left)[4][4], int32_t use) const {
        const uint32_t tile = shared_.inverse();
        const uint32_t row = 16 * at_.warp + 8 * (at_.matrix & 1) + at_.matrix_row;
        const uint32_t factors = shared_.gate(use, Layout::kWriteFactor) + 8 * at_.pair;
#pragma unroll
        for (uint32_t block = 0; block < 4; ++block) {
            if (block > at_.warp) {
                left[block][0] = left[block][1] = left[block][2] = left[block][3] = 0;
                continue;
            }
            uint32_t entries[4];
            device::load_matrix(entries, tile + device::swizzle_128(128 * row + 32 * block +
                                                                    16 * (at_.matrix >> 1)));
            const auto first = device::load_shared<device::Float2>(factors + 64 * block);
            const auto second = device::load_shared<device::Float2>(factors + 64 * block + 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const device::Float2 entry = device::unpack_f16(entries[i]);
                const device::Float2 factor = i < 2 ? first : second;
                left[block][i] = device::pack_bf16(entry.x * factor.x, entry.y * factor.y);
            }
        }
    }
    HCP_DEVICE void multiply_inverse(float (&writes)[64],
                                     uint32_t (&left)[4][4],
                                     int32_t use) const {
        const uint64_t keys = device::matrix_descriptor(shared_.keys(use), kPanelBytes, 1024);
        device::keep_registers(writes);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            device::keep_registers(left[step]);
        }
        device::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            device::wgmma_registers<device::Major::kMn>(
                writes, left[step], device::advance(keys, kTokenStepBytes * step), step > 0);
        }
    }

    /// What makes Q K^T to P: of the blocks before the warp's own by row and column, of its own
    /// block (two tiles of 8 columns, rows row_ and row_ + 8) by element.
    struct ScoreFactors {
        float row[2];
        device::Float2 column[6];
        float own[8];
    };
    /// While the products run.
    HCP_DEVICE void load_factors(ScoreFactors& factors, int32_t use) const {
        const auto pair_at = [&](uint32_t array, uint32_t token) {
            return device::load_shared<device::Float2>(shared_.gate(use, array) + 4 * token);
        };
        const auto at = [&](uint32_t array, uint32_t token) {
            return device::load_shared<float>(shared_.gate(use, array) + 4 * token);
        };
        const uint32_t block_rows = at_.warp == 0 ? 1 : at_.warp;
#pragma unroll
        for (uint32_t tile = 0; tile < 6; ++tile) {
            factors.column[tile] =
                pair_at(Layout::kColumnFactors + block_rows - 1, 8 * tile + 2 * at_.pair);
        }
        device::Float2 sum[2], norm[2];
#pragma unroll
        for (uint32_t tile = 0; tile < 2; ++tile) {
            const uint32_t column = 16 * at_.warp + 8 * tile + 2 * at_.pair;
            sum[tile] = pair_at(Layout::kSum, column);
            norm[tile] = pair_at(Layout::kKeyFactor, column);
        }
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t row = row_ + 8 * i;
            factors.row[i] = at(Layout::kRowFactor, row);
            const float row_sum = at(Layout::kSum, row), query = at(Layout::kQueryFactor, row);
#pragma unroll
            for (uint32_t tile = 0; tile < 2; ++tile) {
                const uint32_t column = 16 * at_.warp + 8 * tile + 2 * at_.pair;
                const float first = row >= column ? row_sum - sum[tile].x : -INFINITY;
                const float second = row >= column + 1 ? row_sum - sum[tile].y : -INFINITY;
                factors.own[4 * tile + 2 * i] =
                    device::exp2_approximate(first) * query * norm[tile].x;
                factors.own[4 * tile + 2 * i + 1] =
                    device::exp2_approximate(second) * query * norm[tile].y;
            }
        }
    }

    /// This lane's rows of P in bf16, two tiles of 8 columns a block of 16; zero above the
    /// diagonal.
    HCP_DEVICE void mask_scores(uint32_t (&packed)[4][4],
                                const float (&scores)[32],
                                const ScoreFactors& factors) const {
#pragma unroll
        for (uint32_t tile = 0; tile < 8; ++tile) {
            const float* score = scores + 4 * tile;
            uint32_t* to = packed[tile >> 1] + 2 * (tile & 1);
            if ((tile >> 1) < at_.warp) {
                const device::Float2 column = factors.column[tile < 6 ? tile : 0];
                to[0] = device::pack_bf16(score[0] * column.x * factors.row[0],
                                          score[1] * column.y * factors.row[0]);
                to[1] = device::pack_bf16(score[2] * column.x * factors.row[1],
                                          score[3] * column.y * factors.row[1]);
            } else if ((tile >> 1) == at_.warp) {
                const float* factor = factors.own + 4 * (tile & 1);
                to[0] = device::pack_bf16(score[0] * factor[0], score[1] * factor[1]);
                to[1] = device::pack_bf16(score[2] * factor[2], score[3] * factor[3]);
            } else {
                to[0] = to[1] = 0;
            }
        }
    }

    /// The address of this lane's row for stmatrix, piece `piece` of 16 bytes.
    [[nodiscard]] HCP_DEVICE uint32_t store_offset(uint32_t piece) const {
        const uint32_t row = 16 * at_.warp + 8 * (at_.matrix & 1) + at_.matrix_row;
        return device::swizzle_128(128 * row + 16 * piece);
    }
    HCP_DEVICE void store_scores(const uint32_t (&packed)[4][4], int32_t use) const {
#pragma unroll
        for (uint32_t block = 0; block < 4; ++block) {
            device::store_matrix(shared_.scores(use) + store_offset(2 * block + (at_.matrix >> 1)),
                                 packed[block]);
        }
    }
    HCP_DEVICE void store_writes(const float (&writes)[64], int32_t use) const {
#pragma unroll
        for (uint32_t block = 0; block < 8; ++block) {
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                packed[i] =
                    device::pack_bf16(writes[8 * block + 2 * i], writes[8 * block + 2 * i + 1]);
            }
            device::store_matrix(shared_.writes(use) + kPanelBytes * (block >> 2) +
                                     store_offset((2 * block & 7) + (at_.matrix >> 1)),
                                 packed);
        }
    }

    const StateGradientParams& p_;
    const StateGradientShared& shared_;
    const StateGradientItem& item_;
    LanePlace at_;
    uint32_t row_;
};

}  // namespace hybridcp::gdn::cuda
