#pragma once

// What the auxiliary warpgroups of the forward kernel share: products of tokens x tokens, the
// factors of their decay, and the way to the other block.

#include "kernels/gdn/cuda/forward_layout.cuh"
#include "kernels/gdn/cuda/pieces.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

/// Named barriers of the block.
constexpr uint32_t kKeyBarrier = 1;    // first auxiliary warpgroup; 2: second, for K
constexpr uint32_t kQueryBarrier = 2;  // second, for Q
constexpr uint32_t kStateBarrier = 3;
constexpr uint32_t kInverseReady = 4;  // from the first to the second
constexpr uint32_t kInverseRead = 5;   // and back
constexpr uint32_t kNormsReady = 6;    // from the first to the second

/// kInverseReady to kNormsReady: one warpgroup arrives, the other waits. racecheck loses the order
/// of such barriers: for it they are mbarriers.
template <class Config>
HCP_DEVICE void arrive_between(const ForwardShared<Config>& shared, uint32_t id) {
    if constexpr (device::kRacecheck) {
        device::mbarrier_arrive(
            shared.barrier(Config::kBetween + static_cast<int>(id - kInverseReady)));
    } else {
        device::barrier_arrive(id, 256);
    }
}
/// `use` counts the chunks for which it has been used.
template <class Config>
HCP_DEVICE void wait_between(const ForwardShared<Config>& shared, uint32_t id, int use) {
    if constexpr (device::kRacecheck) {
        arrive_between(shared, id);
        device::mbarrier_wait(
            shared.barrier(Config::kBetween + static_cast<int>(id - kInverseReady)), use & 1);
    } else {
        device::barrier_sync(id, 256);
    }
}
/// The number of chunk `i` among those with outputs that this block owns.
HCP_DEVICE int own_use(const Walk& walk, int i) {
    return (i - walk.catch_up()) >> 1;
}

/// d = A B^T for two tiles of tokens x K.
HCP_DEVICE void issue_tokens(float (&d)[32], uint32_t a_tile, uint32_t b_tile) {
    using device::Major;
    const uint64_t a = device::matrix_descriptor(a_tile, 16, 1024);
    const uint64_t b = device::matrix_descriptor(b_tile, 16, 1024);
    device::keep_registers(d);
    device::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const uint32_t step = (k >> 2) * kPanelBytes + (k & 3) * 32;
        device::wgmma_shared<Major::kK, Major::kK>(d, device::advance(a, step),
                                                   device::advance(b, step), k > 0);
    }
    device::wgmma_commit();
}

/// Where a lane's elements of a product of tokens x tokens lie: rows first_row and first_row + 8.
/// The lane with `diagonal` holds the diagonal of both, at (pair / 2, odd) of the diagonal blocks.
struct TokenLane {
    uint32_t warp, lane, group, pair, first_row;
    bool diagonal, odd;
    HCP_DEVICE TokenLane() {
        warp =
            device::shuffle(device::warp_index() % 4, 0);  // so that the compiler sees it uniform
        lane = device::lane_index();
        group = lane / 4;
        pair = lane & 3;
        first_row = 16 * warp + group;
        diagonal = pair == group / 2;
        odd = (group & 1) != 0;
    }
    /// The value for this warp; registers cannot be indexed.
    [[nodiscard]] HCP_DEVICE float of_warp(float w0, float w1, float w2, float w3) const {
        return warp < 2 ? (warp == 0 ? w0 : w1) : (warp == 2 ? w2 : w3);
    }
};

/// In |x|^2 + epsilon, as the contract has it.
constexpr float kNormEpsilon = 1e-6F;

/// Where the norms of a key head's tokens go: backward needs them, from one value head each.
HCP_DEVICE float* norms_of(float* norms, const Walk& walk, const Shape& shape) {
    return norms == nullptr || !walk.first_of_key_head
               ? nullptr
               : norms + int64_t{walk.key_head} * shape.tokens;
}
HCP_DEVICE void store_norms(float* norms, Chunk chunk, const TokenLane& at, const float (&r)[2]) {
    if (norms == nullptr || at.pair != 0) {
        return;
    }
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
        const auto row = static_cast<int32_t>(at.first_row + 8 * half);
        if (row < chunk.tokens) {
            device::store_global(norms + chunk.token + row, r[half]);
        }
    }
}

/// Copies a part of this block's stage of updates to the same place in the other block.
template <class Config>
HCP_DEVICE void send(const ForwardShared<Config>& shared, int i, uint32_t part, uint32_t bytes) {
    const uint32_t from = shared.update(i) + part, other = shared.rank ^ 1;
    const uint32_t full = shared.template barrier<Config::kUpdateFull, Config::kUpdates>(i);
    device::bulk_copy_cluster(device::map_shared(from, other), from, bytes,
                              device::map_shared(full, other));
}

/// Factors of Gam for a lane's rows, as the gate warp left them.
struct TokenDecays {
    float row[2];              // anchored at the warp's block
    float own[8];              // Gam of the diagonal block: two tiles of 16 x 8
    device::Float2 column[6];  // of the columns before it

    HCP_DEVICE void load(uint32_t gates, const TokenLane& at) {
        const auto field = [&](uint32_t name, uint32_t token) {
            return device::load_shared<float>(gates + 4 * (name + token));
        };
        row[0] = field(kRowField, at.first_row);
        row[1] = field(kRowField, at.first_row + 8);
        const float sum[2] = {field(kSumField, at.first_row), field(kSumField, at.first_row + 8)};
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t) {
            const uint32_t j = 16 * at.warp + 8 * t + 2 * at.pair;
            const auto b = device::load_shared<device::Float2>(gates + 4 * (kSumField + j));
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const uint32_t i = at.first_row + 8 * half;
                own[4 * t + 2 * half] = i >= j ? device::exp2_approximate(sum[half] - b.x) : 0.0F;
                own[4 * t + 2 * half + 1] =
                    i >= j + 1 ? device::exp2_approximate(sum[half] - b.y) : 0.0F;
            }
        }
        // Warp 0 has no columns before it; what it loads here is finite and not used.
        const uint32_t from = gates + 4 * (kRowField + 64 * at.warp) + 8 * at.pair;
#pragma unroll
        for (uint32_t t = 0; t < 6; ++t) {
            column[t] = device::load_shared<device::Float2>(from + 32 * t);
        }
    }
};

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
