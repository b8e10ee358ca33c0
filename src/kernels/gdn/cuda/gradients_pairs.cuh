#pragma once

// dP and dN of the gradients kernel from products of pairs of tokens, and their parts of dg. Of a
// warp's 16 rows only the blocks up to the diagonal count. What all value heads of a key head share
// is multiplied once (store_products), and what is linear in them is summed before it is rounded.

#include "kernels/gdn/cuda/gradients_fragments.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients {

/// The two columns of sums[8 step + 2 i] and the next.
HCP_DEVICE uint32_t pair_column(uint32_t step, uint32_t i, const Place& at) {
    return 16 * step + i / 2 * 8 + at.pair;
}
HCP_DEVICE uint32_t products_of(uint32_t products, const Place& at) {
    return products + blocks_before(at.warp) * kBlockBytes + 16 * device::lane_index();
}

/// factor r_i r_j (Q or K)_i . K_j for i > j, else 0, each lane's for itself.
HCP_DEVICE void store_products(const float (&keys)[32],
                               device::Float2 factor,
                               uint32_t norms,
                               uint32_t products,
                               const Place& at) {
#pragma unroll
    for (uint32_t step = 0; step < 4; ++step) {
        if (step > at.warp) {
            break;
        }
        float x[8];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t column = pair_column(step, i, at), row = at.row + i % 2 * 8;
            const device::Float2 norm = pair_at(norms, column);
            const float of_row = i % 2 == 0 ? factor.x : factor.y;
            const float* key = keys + 8 * step + 2 * i;
            x[2 * i] = column < row ? of_row * norm.x * key[0] : 0.0F;
            x[2 * i + 1] = column + 1 < row ? of_row * norm.y * key[1] : 0.0F;
        }
        const uint32_t to = products_of(products, at) + step * kBlockBytes;
        device::store_shared(to, device::Float4{x[0], x[1], x[2], x[3]});
        device::store_shared(to + 512, device::Float4{x[4], x[5], x[6], x[7]});
    }
}

/// What is above the diagonal is not masked but kept finite: its products are 0, and it never
/// leaves the sums.
HCP_DEVICE float decay_between(float later, float earlier) {
    constexpr float kMost = 64.0F;
    const float between = later - earlier;
    return device::exp2_approximate(between < kMost ? between : kMost);
}

/// Adds factor e^{b_i - b_j} (dO or dR) D^T to `total`; `columns` get the sums over rows of
/// their part of N, `through` those over columns, by lane and without the factor. Of columns from
/// 32 Half on.
template <uint32_t Half>
HCP_DEVICE void weigh_pairs(const float (&solved)[16],
                            device::Float2 factor,
                            uint32_t slot,
                            uint32_t products,
                            const Place& at,
                            float (&total)[32],
                            float (&columns)[8],
                            device::Float2& through) {
    const device::Float2 sum = rows_at(slot + kSum * kVectorBytes, at);
#pragma unroll
    for (uint32_t step = 2 * Half; step < 2 * Half + 2; ++step) {
        if (step > at.warp) {
            break;
        }
        const uint32_t from = products_of(products, at) + step * kBlockBytes;
        const auto first = device::load_shared<device::Float4>(from);
        const auto second = device::load_shared<device::Float4>(from + 512);
        const float product[8] = {first.x,  first.y,  first.z,  first.w,
                                  second.x, second.y, second.z, second.w};
        float of_step[4] = {0.0F, 0.0F, 0.0F, 0.0F};
        device::Float2 earlier = {0.0F, 0.0F};
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
            const uint32_t column = i / 4 * 2 + i % 2;
            const bool top = i % 4 < 2;
            if (i % 4 == 0) {
                earlier = pair_at(slot + kSum * kVectorBytes, pair_column(step, i / 2, at));
            }
            const float decayed =
                solved[8 * step - 16 * Half + i] *
                decay_between(top ? sum.x : sum.y, i % 2 == 0 ? earlier.x : earlier.y);
            const float weighed = decayed * (top ? factor.x : factor.y);
            (top ? through.x : through.y) += decayed * product[i];
            total[8 * step + i] += weighed;
            of_step[column] += weighed * product[i];
        }
        fold_columns<2, 16>(of_step);
        columns[2 * step] = of_step[0];
        columns[2 * step + 1] = of_step[1];
    }
}

/// total_ij a_i and total_ij b_j of sums[8 step ..], j <= i or, if strictly, j < i.
struct PackedBlock {
    uint32_t by_row[4], by_column[4];
};
HCP_DEVICE PackedBlock pack_block(const float (&total)[32],
                                  uint32_t step,
                                  bool strictly,
                                  device::Float2 of_row,
                                  device::Float2 factor,
                                  uint32_t of_column,
                                  const Place& at) {
    PackedBlock packed;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t column = pair_column(step, i, at);
        const uint32_t end = at.row + i % 2 * 8 + (strictly ? 0 : 1);
        const device::Float2 norm = pair_at(of_column, column);
        const float row = i % 2 == 0 ? of_row.x : of_row.y;
        const float constant = i % 2 == 0 ? factor.x : factor.y;
        const float x = column < end ? total[8 * step + 2 * i] : 0.0F;
        const float y = column + 1 < end ? total[8 * step + 2 * i + 1] : 0.0F;
        packed.by_row[i] = device::pack_bf16(x * row, y * row);
        packed.by_column[i] = device::pack_bf16(x * (constant * norm.x), y * (constant * norm.y));
    }
    return packed;
}

/// s dP r_q to `tile`, for its transpose as operand A, and s dP r_k as operand A itself.
HCP_DEVICE void pack_reads(const float (&total)[32],
                           float scale,
                           uint32_t slot,
                           uint32_t tile,
                           const Place& at,
                           uint32_t (&operand)[4][4]) {
    const device::Float2 norm = rows_at(slot + kQueryNorm * kVectorBytes, at);
#pragma unroll
    for (uint32_t step = 0; step < 4; ++step) {
        const PackedBlock packed = pack_block(total, step, false, {scale * norm.x, scale * norm.y},
                                              {scale, scale}, slot + kKeyNorm * kVectorBytes, at);
        device::store_matrix(block_address(tile, 16 * at.warp, 16 * step), packed.by_row);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            operand[step][i] = packed.by_column[i];
        }
    }
}

/// (dN + dN^T) diag(r_k) to `tile`: dN r_k below the diagonal, (r_k dN)^T above it.
HCP_DEVICE void pack_erasures(const float (&total)[32],
                              uint32_t slot,
                              uint32_t tile,
                              const Place& at) {
    const uint32_t norms = slot + kKeyNorm * kVectorBytes;
    const device::Float2 norm = rows_at(norms, at);
#pragma unroll
    for (uint32_t step = 0; step < 4; ++step) {
        if (step > at.warp) {
            break;
        }
        PackedBlock packed = pack_block(total, step, true, norm, {1.0F, 1.0F}, norms, at);
        if (step < at.warp) {
            device::store_matrix_transposed(transposed_address(tile, 16 * step, 16 * at.warp),
                                            packed.by_row);
        } else {
            packed.by_column[0] |= device::transpose_matrix(packed.by_row[0]);
            packed.by_column[2] = device::transpose_matrix(packed.by_row[1]);
            packed.by_column[3] |= device::transpose_matrix(packed.by_row[3]);
        }
        device::store_matrix(block_address(tile, 16 * at.warp, 16 * step), packed.by_column);
    }
}

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS::gradients
