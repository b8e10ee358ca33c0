#pragma once

// dq^ and dk^ of the value heads of a key head are summed in fp32. Of every 16 rows a block of the
// group finishes 16 / group neighbours, so of a lane's two rows at most one (both if it is alone).
// Lanes keep that row in registers and send the other straight to the same lane of its owner.

#include "kernels/gdn/cuda/gradients_fragments.cuh"

namespace hybridcp::gdn::cuda::gradients {

/// The part of dk^ that comes from what the chunk writes, from lane to lane of two warpgroups.
HCP_DEVICE uint32_t writes_part(const Block& block, const Place& at) {
    return block.shared + kWritesPart + at.warp * 8192 + device::lane_index() * 16;
}
HCP_DEVICE void store_writes_part(const Block& block, const Place& at, const float (&sums)[64]) {
    const uint32_t to = writes_part(block, at);
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
        const float* sum = sums + 4 * i;
        device::store_shared(to + 512 * i, device::Float4{sum[0], sum[1], sum[2], sum[3]});
    }
}
HCP_DEVICE void add_writes_part(const Block& block,
                                const Item& item,
                                const Place& at,
                                float (&sums)[64]) {
    device::mbarrier_wait(block.barrier(kWritesPartFull), item.parity());
    const uint32_t from = writes_part(block, at);
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
        const auto more = device::load_shared<device::Float4>(from + 512 * i);
        sums[4 * i] += more.x;
        sums[4 * i + 1] += more.y;
        sums[4 * i + 2] += more.z;
        sums[4 * i + 3] += more.w;
    }
    arrive_warp(block, kWritesPartEmpty);
}

HCP_DEVICE uint32_t owner_of(const Block& block, uint32_t row) {
    return row * block.group / 16;
}
/// 8 if of the rows `row` and `row` + 8 this block finishes the second or none, else 0.
HCP_DEVICE uint32_t kept_row(const Block& block, uint32_t row) {
    return owner_of(block, row) == block.rank ? 0 : 8;
}

/// The kept rows of K or Q as pairs of bf16: `rows`[j] has columns 8 j + pair and the next.
HCP_DEVICE void load_kept_rows(
    const Block& block, const Place& at, Tile tile, uint32_t below, uint32_t (&rows)[16]) {
    const uint32_t lane = device::lane_index();
    const uint32_t row = 16 * at.warp + lane % 8 + below;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        uint32_t four[4];
        device::load_matrix(four, element(block.tile(tile), row, 32 * i + lane / 8 * 8));
        for (uint32_t j = 0; j < 4; ++j) {
            rows[4 * i + j] = four[j];
        }
    }
}
/// The same, after which the tile is no longer needed, unless there are more rows to finish.
HCP_DEVICE void take_rows(const Block& block, const Place& at, Tile tile, uint32_t (&rows)[16]) {
    load_kept_rows(block, at, tile, kept_row(block, device::lane_index() % 8), rows);
    if (block.group > 1) {
        release(block, tile);
    }
}

/// Pieces of 16 bytes of a lane's row, of which each sender has 8 a turn or, if the senders are
/// many, 4 a round.
struct Slots {
    uint32_t address, stride;
};
HCP_DEVICE Slots
slots_of(const Block& block, const Place& at, Sum sum, uint32_t row, uint32_t sender) {
    const uint32_t rows = (16 + block.group - 1) / block.group, stride = rows * 64;
    const uint32_t pieces = block.group > 2 ? 4 : 8;
    return {block.shared + kReceived + sum * kReceivedBytes + at.warp * kReceivedWarpBytes +
                sender * pieces * stride + row % rows * 64 + at.pair * 8,
            stride};
}

/// Where a lane sends one of its rows.
struct Receiver {
    uint32_t to, stride, barrier;
};
HCP_DEVICE Receiver receiver_of(const Block& block, const Place& at, Sum sum, uint32_t row) {
    const uint32_t owner = owner_of(block, row);
    const Slots slots =
        slots_of(block, at, sum, row, block.rank < owner ? block.rank : block.rank - 1);
    return {device::map_shared(slots.address, owner), slots.stride,
            device::map_shared(block.barrier(kReceivedFull + 4 * sum + at.warp), owner)};
}
/// Pieces First to First + 3.
template <uint32_t First>
HCP_DEVICE void send(const Receiver& receiver, const float (&row)[32], uint32_t slot) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const float* x = row + 4 * (First + i);
        device::store_cluster_async(receiver.to + (slot + i) * receiver.stride,
                                    {x[0], x[1], x[2], x[3]}, receiver.barrier);
    }
}

/// Adds pieces First to First + Count - 1 of all senders.
template <uint32_t First, uint32_t Count>
HCP_DEVICE void receive(const Block& block,
                        const Place& at,
                        Sum sum,
                        uint32_t row,
                        uint32_t parity,
                        float (&kept)[32]) {
    const bool keeps = owner_of(block, row) == block.rank;
    const uint32_t barrier = block.barrier(kReceivedFull + 4 * sum + at.warp);
    const uint32_t first = (16 * block.rank + block.group - 1) / block.group;
    const uint32_t end = (16 * block.rank + 16 + block.group - 1) / block.group;
    if (device::lane_index() == 0) {
        device::mbarrier_arrive_expect(barrier, (end - first) * (block.group - 1) * Count * 64);
    }
    device::mbarrier_wait(barrier, parity);
    for (uint32_t sender = 0; keeps && sender + 1 < block.group; ++sender) {
        const Slots slots = slots_of(block, at, sum, row, sender);
#pragma unroll
        for (uint32_t i = 0; i < Count; ++i) {
            const auto more = device::load_shared<device::Float4>(slots.address + i * slots.stride);
            float* x = kept + 4 * (First + i);
            x[0] += more.x;
            x[1] += more.y;
            x[2] += more.z;
            x[3] += more.w;
        }
    }
}
/// Lets the others send again.
HCP_DEVICE void release_received(const Block& block, const Place& at, Sum sum) {
    device::sync_warp();
    const uint32_t lane = device::lane_index();
    if (lane < block.group && lane != block.rank) {
        device::mbarrier_arrive_cluster(
            device::map_shared(block.barrier(kReceivedEmpty + 4 * sum + at.warp), lane));
    }
}

/// Sums `kept` over the group; `given` and, if this lane finishes no row, `kept` go to others.
HCP_DEVICE void exchange(const Block& block,
                         const Item& item,
                         const Place& at,
                         Sum sum,
                         float (&kept)[32],
                         const float (&given)[32]) {
    const uint32_t top = device::lane_index() / 4, row = top + kept_row(block, top);
    const bool keeps = owner_of(block, row) == block.rank, in_rounds = block.group > 2;
    const uint32_t empty = block.barrier(kReceivedEmpty + 4 * sum + at.warp);
    const Receiver of_given = receiver_of(block, at, sum, row ^ 8);
    device::mbarrier_wait(empty, (in_rounds ? 0 : item.parity()) ^ 1);
    send<0>(of_given, given, 0);
    if (!in_rounds) {
        send<4>(of_given, given, 4);
        receive<0, 8>(block, at, sum, row, item.parity(), kept);
        return;
    }
    const Receiver of_kept = receiver_of(block, at, sum, row);
    if (!keeps) {
        send<0>(of_kept, kept, 0);
    }
    receive<0, 4>(block, at, sum, row, 0, kept);
    release_received(block, at, sum);
    device::mbarrier_wait(empty, 0);
    send<4>(of_given, given, 0);
    if (!keeps) {
        send<4>(of_kept, kept, 0);
    }
    receive<4, 4>(block, at, sum, row, 1, kept);
}

}  // namespace hybridcp::gdn::cuda::gradients
