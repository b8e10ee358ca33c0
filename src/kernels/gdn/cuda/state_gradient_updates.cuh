#pragma once

// The warpgroup that makes P and U.

#include "kernels/gdn/cuda/state_gradient_auxiliary.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

class StateGradientUpdates : StateGradientAuxiliary {
  public:
    HCP_DEVICE StateGradientUpdates(const StateGradientParams& p,
                                    const StateGradientShared& shared,
                                    const StateGradientItem& item)
        : StateGradientAuxiliary(shared, item),
          scale_(p.shape.scale),
          row_(16 * at_.warp + at_.row) {}

    HCP_DEVICE void run() const {
        for (auto use = static_cast<int32_t>(shared_.rank); use < item_.uses; use += 2) {
            make_updates(use);
        }
    }

  private:
    /// What makes Q K^T to P: of the blocks before the warp's own by row and column, of its own
    /// block (two tiles of 8 columns, rows row_ and row_ + 8) by element.
    struct ScoreFactors {
        float row[2], output[2];
        device::Float2 column[6];
        float own[8];
    };

    HCP_DEVICE void make_updates(int32_t use) const {
        uint32_t scores[4][4];
        float updates[64];
        make_scores(scores, updates, use);
        const bool hands_scores = use >= item_.first_score();
        const int32_t score_use = item_.score_use(use);
        if (hands_scores) {
            shared_.scores_ring.wait_empty(score_use);
            store_scores(scores, use);
        }
        shared_.writes_ring.wait_full(use);
        device::keep_registers(updates);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            device::keep_registers(scores[step]);
        }
        device::wgmma_fence();
        add_outer_products(updates, scores, shared_.writes(use));
        device::wgmma_commit();
        shared_.updates_ring.wait_empty(use);
        device::wgmma_wait<0>();
        device::keep_registers(updates);
        store_rows(updates, shared_.updates(use));
        publish<Layout::kUpdateBarrier>();
        hand_over(shared_.updates_ring.full(use), shared_.updates(use), Layout::kTileBytes);
        if (hands_scores) {
            hand_over(shared_.scores_ring.full(score_use), shared_.scores(use), kPanelBytes);
        }
    }

    /// P, and s gamma r_q Q.
    HCP_DEVICE void make_scores(uint32_t (&packed)[4][4], float (&scaled)[64], int32_t use) const {
        uint32_t queries[8][4];  // in fp16
        float scores[32];
        if constexpr (kFp16) {
            shared_.gates.wait_full(use);
            load_queries(queries, use);
            release_queries(use);
        }
        multiply_queries(scores, queries, use);
        shared_.gates.wait_full(use);
        ScoreFactors factors;
        load_factors(factors, use);
        device::wgmma_wait<0>();
        device::keep_registers(scores);
        if constexpr (kFp16) {
            keep(queries);
        }
        arrive_empty_at_both(shared_.keys_ring, use);
        mask_scores(packed, scores, factors);
        release_gates(use);
        if constexpr (!kFp16) {
            load_queries(queries, use);
        }
        scale_queries(scaled, queries, factors);
        if constexpr (!kFp16) {
            release_queries(use);
        }
    }
    HCP_DEVICE static void keep(uint32_t (&queries)[8][4]) {
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            device::keep_registers(queries[step]);
        }
    }
    /// Q K^T. Q in fp16 is made in registers.
    HCP_DEVICE void multiply_queries(float (&scores)[32],
                                     uint32_t (&queries)[8][4],
                                     int32_t use) const {
        shared_.wait_keys(use);
        if constexpr (kFp16) {
            keep(queries);
            device::keep_registers(scores);
            device::wgmma_fence();
            multiply_by_keys(scores, queries, shared_.keys(use));
        } else {
            shared_.queries_ring.wait_full(StateGradientShared::query_use(use));
            const uint64_t keys_tile = device::matrix_descriptor(shared_.keys(use), 16, 1024);
            const uint64_t queries_tile = device::matrix_descriptor(shared_.queries(use), 16, 1024);
            device::keep_registers(scores);
            device::wgmma_fence();
#pragma unroll
            for (int step = 0; step < 8; ++step) {
                const uint32_t offset = kPanelBytes * (step >> 2) + 32 * (step & 3);
                device::wgmma_shared<device::Major::kK, device::Major::kK>(
                    scores, device::advance(queries_tile, offset),
                    device::advance(keys_tile, offset), step > 0);
            }
        }
        device::wgmma_commit();
    }

    /// This lane's places in Q, in fp16 times the powers of two in r_q.
    HCP_DEVICE void load_queries(uint32_t (&queries)[8][4], int32_t use) const {
        uint32_t powers[2] = {0, 0};
#pragma unroll
        for (uint32_t i = 0; kFp16 && i < 2; ++i) {
            powers[i] = bf16_pair(power_in(device::load_shared<float>(
                shared_.gate(use, Layout::kQueryFactor) + 4 * (row_ + 8 * i))));
        }
        shared_.queries_ring.wait_full(StateGradientShared::query_use(use));
#pragma unroll
        for (uint32_t step = 0; step < 8; ++step) {
            device::load_matrix(queries[step],
                                shared_.queries(use) + kPanelBytes * (step >> 2) +
                                    store_offset((2 * step & 7) + (at_.matrix >> 1)));
#pragma unroll
            for (int i = 0; kFp16 && i < 4; ++i) {
                queries[step][i] = to_f16(queries[step][i], powers[i & 1]);
            }
        }
    }
    HCP_DEVICE void release_queries(int32_t use) const {
        device::fence_proxy_async();  // else the next Q can overtake the loads
        device::arrive_warp(shared_.queries_ring.empty(StateGradientShared::query_use(use)));
    }

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
            const device::Float2 r_k = pair_at(Layout::kKeyFactor, column);
            norm[tile] = {rest_of(r_k.x), rest_of(r_k.y)};
        }
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t row = row_ + 8 * i;
            factors.row[i] = at(Layout::kRowFactor, row);
            factors.output[i] = at(Layout::kOutputFactor, row);
            const float row_sum = at(Layout::kSum, row);
            const float query = scale_ * rest_of(at(Layout::kQueryFactor, row));
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

    /// This lane's rows of P, two tiles of 8 columns a block of 16; zero above the
    /// diagonal, as the factors of columns are beyond the blocks before the warp's own. Without
    /// branches, which take longer than the products that they save.
    HCP_DEVICE void mask_scores(uint32_t (&packed)[4][4],
                                const float (&scores)[32],
                                const ScoreFactors& factors) const {
#pragma unroll
        for (uint32_t tile = 0; tile < 8; ++tile) {
            const device::Float2 column =
                tile < 6 ? factors.column[tile] : device::Float2{0.0F, 0.0F};
            const bool is_own = (tile >> 1) == at_.warp;
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                const uint32_t j = 4 * (tile & 1) + 2 * i;
                const float first = is_own ? factors.own[j] : column.x * factors.row[i];
                const float second = is_own ? factors.own[j + 1] : column.y * factors.row[i];
                packed[tile >> 1][2 * (tile & 1) + i] = pack_operand(
                    scores[4 * tile + 2 * i] * first, scores[4 * tile + 2 * i + 1] * second);
            }
        }
    }

    HCP_DEVICE void store_scores(const uint32_t (&packed)[4][4], int32_t use) const {
#pragma unroll
        for (uint32_t block = 0; block < 4; ++block) {
            device::store_matrix(shared_.scores(use) + store_offset(2 * block + (at_.matrix >> 1)),
                                 packed[block]);
        }
    }
    /// This lane's places in products of tokens x K: s gamma r_q Q.
    HCP_DEVICE static void scale_queries(float (&scaled)[64],
                                         const uint32_t (&queries)[8][4],
                                         const ScoreFactors& factors) {
#pragma unroll
        for (uint32_t block = 0; block < 8; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const device::Float2 entry = unpack_operand(queries[block][i]);
                scaled[8 * block + 2 * i] = entry.x * factors.output[i & 1];
                scaled[8 * block + 2 * i + 1] = entry.y * factors.output[i & 1];
            }
        }
    }

    float scale_;
    uint32_t row_;
};

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
