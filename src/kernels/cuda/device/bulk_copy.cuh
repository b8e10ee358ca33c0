#pragma once

// Asynchronous copies by the copy engine (TMA). One thread issues them. Loads complete on an
// mbarrier, which must expect their bytes; stores complete in groups of the issuing thread.

#include <cuda.h>

#include "kernels/cuda/device/racecheck.cuh"

namespace hybridcp::device {

/// Kept in a __grid_constant__ parameter.
using TensorMap = CUtensorMap;

/// Copies `bytes` (a multiple of 16, as both addresses) of global memory to shared memory.
HCP_DEVICE void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
/// Copies shared memory of this block to that of another; `to` and `barrier` come from map_shared.
HCP_DEVICE void bulk_copy_cluster(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
    touch_source(from, bytes);
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "r"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
HCP_DEVICE void bulk_store(void* to, uint32_t from, uint32_t bytes) {
    touch_source(from, bytes);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

/// Where a box starts in a 3-d tensor, in elements, the contiguous index first.
struct TensorPosition {
    int32_t x, y, z;
};

/// Loads one box; elements outside the tensor become zeros.
HCP_DEVICE void tensor_load(uint32_t to,
                            const TensorMap* map,
                            uint32_t barrier,
                            TensorPosition at) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3,%4,%5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z)
        : "memory");
}
/// Writes the box to the same place in each block of the cluster whose bit is set in `blocks`, and
/// completes on the barrier at the same place there.
HCP_DEVICE void tensor_load_multicast(
    uint32_t to, const TensorMap* map, uint32_t barrier, TensorPosition at, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3,%4,%5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z), "h"(blocks)
        : "memory");
}
/// Stores one box, of so many bytes; elements outside the tensor are dropped.
HCP_DEVICE void tensor_store(const TensorMap* map,
                             uint32_t from,
                             TensorPosition at,
                             uint32_t bytes = 8192) {
    touch_source(from, bytes);
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2,%3,%4}], [%1];" ::"l"(map),
        "r"(from), "r"(at.x), "r"(at.y), "r"(at.z)
        : "memory");
}

/// Closes the group of the stores issued since the last commit.
HCP_DEVICE void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until at most `Pending` of this thread's groups are incomplete.
template <int Pending>
HCP_DEVICE void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}
/// The same, but for the reads of shared memory alone, which may then be written again.
template <int Pending>
HCP_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

}  // namespace hybridcp::device
