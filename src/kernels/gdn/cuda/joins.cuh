#pragma once

// Summaries of a segment's parts joined (docs/gdn-cuda.md): S = S_p + M_p S over the parts p in
// order, M = M_p M, and dS = dS_p + M_p^T dS from the last part on; fp32. A block makes some
// columns of one head; where they are zero so far, as those of forgotten parts are, it does not
// multiply. Launch: kThreads, kSharedBytes, blocks(p) blocks.

#include "kernels/gdn/cuda/launch.h"
#include "kernels/gdn/cuda/problem.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

struct JoinParams : JoinView {
    Shape shape;
};

struct Joining {
    static constexpr int32_t kColumns = 16, kColumnsOfThread = 8;
    static constexpr int kThreads = kHeadDim * kColumns / kColumnsOfThread;
    static constexpr int32_t kWarps = kThreads / 32, kRowsOfWarp = kHeadDim / kWarps;
    static constexpr uint32_t kRowBytes = 4 * kColumns;
    // Of M: lanes that read four columns of a row each then meet no bank twice.
    static constexpr uint32_t kPitch = 4 * kHeadDim + 16;
    static constexpr uint32_t kTransition = kHeadDim * kRowBytes;
    static constexpr uint32_t kFlags = kTransition + kHeadDim * kPitch;  // one a warp
    static constexpr uint32_t kSharedBytes = kFlags + 4 * kWarps;
    static constexpr int32_t kBlocksOfHead = kHeadDim / kColumns;

    HCP_DEVICE static constexpr int64_t blocks(const JoinParams& p) {
        const int32_t kinds = (p.states != nullptr ? 1 : 0) + (p.products != nullptr ? 1 : 0);
        return int64_t{p.num_joins} * p.shape.value_heads * kBlocksOfHead * kinds;
    }

    const JoinParams& p;
    float* matrices;  // of all slots
    bool adds;        // a part's own to what comes through it
    Join join;
    int32_t head, row, column;  // column: of those of the block
    int32_t first_column;

    HCP_DEVICE explicit Joining(const JoinParams& params) : p(params) {
        const auto block = static_cast<int32_t>(device::block_index());
        const auto thread = static_cast<int32_t>(device::thread_index());
        head = block / kBlocksOfHead % p.shape.value_heads;
        const int32_t item = block / kBlocksOfHead / p.shape.value_heads;
        const Join* from = p.joins + item % p.num_joins;
        join = {device::load_global(&from->segment), device::load_global(&from->first_slot),
                device::load_global(&from->parts)};
        adds = p.states != nullptr && item < p.num_joins;
        matrices = adds ? p.states : p.products;
        row = thread % kHeadDim;
        column = thread / kHeadDim * kColumnsOfThread;
        first_column = block % kBlocksOfHead * kColumns;
    }

    /// The lane's part of a matrix's row.
    HCP_DEVICE float* place(int32_t slot) const {
        return matrices + p.shape.state_offset(slot, head) + int64_t{row} * kHeadDim +
               first_column + column;
    }
    HCP_DEVICE uint32_t shared(int32_t of_row) const {
        return device::shared_base() + static_cast<uint32_t>(of_row) * kRowBytes +
               static_cast<uint32_t>(column) * 4;
    }
    HCP_DEVICE static void add(float (&sum)[kColumnsOfThread], float factor, uint32_t from) {
#pragma unroll
        for (uint32_t i = 0; i < kColumnsOfThread / 4; ++i) {
            const auto four = device::load_shared<device::Float4>(from + 16 * i);
            sum[4 * i] += factor * four.x;
            sum[4 * i + 1] += factor * four.y;
            sum[4 * i + 2] += factor * four.z;
            sum[4 * i + 3] += factor * four.w;
        }
    }
    HCP_DEVICE void load(float (&to)[kColumnsOfThread], int32_t slot) const {
#pragma unroll
        for (int32_t i = 0; i < kColumnsOfThread / 4; ++i) {
            const auto four =
                device::load_global(reinterpret_cast<const device::Float4*>(place(slot) + 4 * i));
            to[4 * i] = four.x;
            to[4 * i + 1] = four.y;
            to[4 * i + 2] = four.z;
            to[4 * i + 3] = four.w;
        }
    }
    /// Leaves `sum` and whether any of it is not zero.
    HCP_DEVICE void share(const float (&sum)[kColumnsOfThread]) const {
        bool any = false;
#pragma unroll
        for (int32_t i = 0; i < kColumnsOfThread; ++i) {
            any = any || sum[i] != 0.0F;
        }
#pragma unroll
        for (int32_t i = 0; i < kColumnsOfThread / 4; ++i) {
            device::store_shared(
                shared(row) + 16 * static_cast<uint32_t>(i),
                device::Float4{sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]});
        }
        int32_t flag = any ? 1 : 0;
#pragma unroll
        for (uint32_t mask = 16; mask > 0; mask >>= 1) {
            flag |= device::shuffle_xor(flag, mask);
        }
        if (device::lane_index() == 0) {
            device::store_shared(flags() + 4 * device::warp_index(), flag);
        }
    }
    HCP_DEVICE static uint32_t flags() { return device::shared_base() + kFlags; }
    HCP_DEVICE static bool any_shared() {
        int32_t any = 0;
        for (uint32_t warp = 0; warp < kWarps; ++warp) {
            any |= device::load_shared<int32_t>(flags() + 4 * warp);
        }
        return any != 0;
    }
    /// M_p to shared memory; each warp brings rows.
    HCP_DEVICE void bring_transition(int32_t slot) const {
        const auto warp = static_cast<int32_t>(device::warp_index());
        const auto lane = static_cast<int32_t>(device::lane_index());
        const float* from = p.transitions + p.shape.state_offset(slot, head) + 4 * lane;
        device::Float4 four[kRowsOfWarp];
#pragma unroll
        for (int32_t i = 0; i < kRowsOfWarp; ++i) {
            four[i] = device::load_global(reinterpret_cast<const device::Float4*>(
                from + int64_t{warp + kWarps * i} * kHeadDim));
        }
#pragma unroll
        for (int32_t i = 0; i < kRowsOfWarp; ++i) {
            device::store_shared(transition(warp + kWarps * i, 4 * lane), four[i]);
        }
    }
    HCP_DEVICE static uint32_t transition(int32_t of_row, int32_t of_column) {
        return device::shared_base() + kTransition + static_cast<uint32_t>(of_row) * kPitch +
               4 * static_cast<uint32_t>(of_column);
    }
    /// sum += row of M_p or M_p^T times what is shared.
    HCP_DEVICE void multiply(float (&sum)[kColumnsOfThread]) const {
#pragma unroll 2
        for (int32_t k = 0; k < kHeadDim; k += 4) {
            float factors[4];
            if (p.backwards) {
#pragma unroll
                for (int32_t i = 0; i < 4; ++i) {
                    factors[i] = device::load_shared<float>(transition(k + i, row));
                }
            } else {
                const auto four = device::load_shared<device::Float4>(transition(row, k));
                factors[0] = four.x;
                factors[1] = four.y;
                factors[2] = four.z;
                factors[3] = four.w;
            }
#pragma unroll
            for (int32_t i = 0; i < 4; ++i) {
                add(sum, factors[i], shared(k + i));
            }
        }
    }

    HCP_DEVICE void run() const {
        float sum[kColumnsOfThread];
        load(sum, slot_of(0));
#pragma unroll 1
        for (int32_t i = 1; i < join.parts; ++i) {
            device::sync_block();  // all have read the last ones
            share(sum);
#pragma unroll
            for (float& x : sum) {
                x = 0.0F;
            }
            if (adds) {
                load(sum, slot_of(i));
            }
            device::sync_block();
            if (any_shared()) {
                bring_transition(slot_of(i));
                device::sync_block();
                multiply(sum);
            }
        }
#pragma unroll
        for (int32_t i = 0; i < kColumnsOfThread / 4; ++i) {
            device::store_global(
                reinterpret_cast<device::Float4*>(place(join.segment) + 4 * i),
                device::Float4{sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]});
        }
    }
    /// Of the i-th part in the order in which they are joined.
    HCP_DEVICE int32_t slot_of(int32_t i) const {
        return join.first_slot + (p.backwards ? join.parts - 1 - i : i);
    }
};

HCP_DEVICE void join_kernel(const JoinParams& p) {
    Joining(p).run();
}

#ifdef __CUDACC__
__global__ void __launch_bounds__(Joining::kThreads, 2)
    join_summaries(const __grid_constant__ JoinParams p) {
    join_kernel(p);
}
#endif

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
