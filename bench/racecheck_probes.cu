// What compute-sanitizer's racecheck sees: small kernels that are right, and the same with one
// access before its wait ("early"). Found with 2025.3: docs/gdn-cuda.md, "Racecheck".
//   nvcc -O3 -std=c++20 --expt-relaxed-constexpr -I src
//   --generate-code=arch=compute_90a,code=sm_90a
//       [-DHCP_RACECHECK] -o racecheck_probes bench/racecheck_probes.cu
//   compute-sanitizer --tool racecheck ./racecheck_probes
#include <cuda_runtime.h>

#include <cstdio>
#include <string>

#include "kernels/cuda/device.cuh"

namespace {

namespace device = hybridcp::device;
using device::TensorMap;

constexpr uint32_t kTileBytes = 8192, kSharedBytes = 2 * kTileBytes + 1024;
constexpr int kTurns = 3;

__device__ __align__(128) unsigned char source[kTileBytes], target[kTileBytes];
__device__ float sink[256];

/// A tile and mbarriers behind it.
struct Shared {
    uint32_t tile, full, empty, extra;
};
__device__ Shared init(uint32_t full_arrivals, uint32_t empty_arrivals) {
    const uint32_t tile = device::shared_base(), barriers = tile + 2 * kTileBytes;
    const Shared shared = {tile, barriers, barriers + 8, barriers + 16};
    if (device::thread_index() == 0) {
        device::mbarrier_init(shared.full, full_arrivals);
        device::mbarrier_init(shared.empty, empty_arrivals);
        device::mbarrier_init(shared.extra, 1);
        device::fence_mbarrier_init();
    }
    device::sync_block();
    return shared;
}
__device__ void wait_empty(const Shared& shared, int turn) {
    device::mbarrier_wait(shared.empty, (turn & 1) ^ 1);
}
__device__ void wait_full(const Shared& shared, int turn) {
    device::mbarrier_wait(shared.full, turn & 1);
}

enum class Write { kStore, kMatrix, kBulk, kBox };
enum class Read { kLoad, kMatrix, kProduct, kCopy };
enum class Early { kNone, kRead, kWrite };
enum class Arrival { kLanes, kLane0, kLane0Waits };

/// The warp fills the tile; copies complete on `barrier`.
template <Write kWrite>
__device__ void write(const Shared& shared, uint32_t barrier, const TensorMap& map) {
    const uint32_t lane = device::lane_index();
    if constexpr (kWrite == Write::kStore) {
        for (uint32_t at = 16 * lane; at < kTileBytes; at += 512) {
            device::store_shared(shared.tile + at, device::Word4{0, 0, 0, 0});
        }
    } else if constexpr (kWrite == Write::kMatrix) {
        for (uint32_t at = 16 * lane; at < kTileBytes; at += 512) {
            device::store_matrix(shared.tile + at, {0, 0, 0, 0});
        }
    } else if (lane == 0) {
        device::mbarrier_arrive_expect(barrier, kTileBytes);
        if constexpr (kWrite == Write::kBulk) {
            device::bulk_load(shared.tile, source, kTileBytes, barrier);
        } else {
            device::tensor_load(shared.tile, &map, barrier, {0, 0, 0});
        }
    }
    device::fence_proxy_async();
    device::sync_warp();
}
/// Four warps read the tile.
template <Read kRead>
__device__ float read(const Shared& shared) {
    const uint32_t thread = device::thread_index();
    if constexpr (kRead == Read::kLoad) {
        return device::load_shared<float>(shared.tile + 16 * thread);
    } else if constexpr (kRead == Read::kMatrix) {
        uint32_t words[4];
        device::load_matrix(words, shared.tile + 16 * thread);
        return static_cast<float>(words[0] + words[1] + words[2] + words[3]);
    } else if constexpr (kRead == Read::kProduct) {
        float sums[32];
        device::keep_registers(sums);
        device::wgmma_fence();
        const uint64_t tile = device::matrix_descriptor(shared.tile, 16, 1024);
        device::wgmma_shared<device::Major::kK, device::Major::kK>(sums, tile, tile, false);
        device::wgmma_commit();
        device::wgmma_wait<0>();
        device::keep_registers(sums);
        return sums[0];
    } else {
        if (thread == 0) {
            device::bulk_store(target, shared.tile, kTileBytes);
            device::bulk_commit();
            device::bulk_wait_read<0>();
        }
        return 0.0F;
    }
}

/// Warp 4 writes, four warps read.
template <Write kWrite, Read kRead, Early kEarly, Arrival kArrival>
__global__ void exchange(const __grid_constant__ TensorMap map) {
    constexpr bool kCopied = kWrite == Write::kBulk || kWrite == Write::kBox;
    constexpr uint32_t kLanes = kArrival == Arrival::kLane0 ? 1 : 32;
    const Shared shared = init(kCopied ? 1 : kLanes, 4 * kLanes);
    const bool arrives = kLanes == 32 || device::lane_index() == 0;
    float sum = 0.0F;
    for (int turn = 0; turn < kTurns; ++turn) {
        if (device::warp_index() == 4) {
            if constexpr (kEarly == Early::kWrite) {
                write<kWrite>(shared, shared.extra, map);
                if (kCopied) {
                    device::mbarrier_wait(shared.extra, turn & 1);
                }
            }
            if (kArrival != Arrival::kLane0Waits || device::lane_index() == 0) {
                wait_empty(shared, turn);
            }
            device::sync_warp();
            write<kWrite>(shared, shared.full, map);
            if (!kCopied && arrives) {
                device::mbarrier_arrive(shared.full);
            }
        } else {
            if constexpr (kEarly == Early::kRead) {
                sum += read<kRead>(shared);
            }
            wait_full(shared, turn);
            if constexpr (kEarly != Early::kRead) {
                sum += read<kRead>(shared);
            }
            device::sync_warp();
            if (arrives) {
                device::mbarrier_arrive(shared.empty);
            }
        }
    }
    sink[device::thread_index()] = sum;
    device::bulk_wait<0>();
}

/// Two warps, each of which lets the other go on: with bar.arrive, or with bar.sync.
template <bool kArrive>
__global__ void named_barriers(const __grid_constant__ TensorMap map) {
    const Shared shared = init(1, 1);
    const auto pass = [](uint32_t id) {
        if constexpr (kArrive) {
            device::barrier_arrive(id, 64);
        } else {
            device::barrier_sync(id, 64);
        }
    };
    const uint32_t at = shared.tile + 4 * device::lane_index();
    float sum = 0.0F;
    for (int turn = 0; turn < kTurns; ++turn) {
        if (device::warp_index() == 0) {
            if (turn > 0) {
                device::barrier_sync(2, 64);
            }
            device::store_shared(at ^ 124, 1.0F);
            pass(1);
        } else {
            device::barrier_sync(1, 64);
            sum += device::load_shared<float>(at);
            if (turn + 1 < kTurns) {
                pass(2);
            }
        }
    }
    sink[device::thread_index()] = sum;
}

/// Block 0 writes and copies to block 1, whose lanes read and let it go on.
template <Early kEarly>
__global__ void __cluster_dims__(2) cluster_copy(const __grid_constant__ TensorMap map) {
    const Shared shared = init(1, 32);
    const uint32_t copy = shared.tile + kTileBytes, place = 4 * device::lane_index();
    device::cluster_arrive();
    device::cluster_wait();
    float sum = 0.0F;
    for (int turn = 0; turn < kTurns; ++turn) {
        if (device::cluster_rank() == 0) {
            if (kEarly == Early::kWrite) {
                device::store_shared(shared.tile + place, 2.0F);
            }
            wait_empty(shared, turn);
            device::store_shared(shared.tile + place, 1.0F);
            device::fence_proxy_async();
            device::sync_warp();
            if (device::lane_index() == 0) {
                device::bulk_copy_cluster(device::map_shared(copy, 1), shared.tile, 128,
                                          device::map_shared(shared.full, 1));
            }
            device::sync_warp();
        } else {
            if (device::lane_index() == 0) {
                device::mbarrier_arrive_expect(shared.full, 128);
            }
            device::sync_warp();
            if (kEarly == Early::kRead) {
                sum += device::load_shared<float>(copy + place);
            }
            wait_full(shared, turn);
            sum += device::load_shared<float>(copy + place);
            device::mbarrier_arrive_cluster(device::map_shared(shared.empty, 0));
        }
    }
    sink[device::thread_index()] = sum;
    device::cluster_arrive();
    device::cluster_wait();
}

int failures = 0;

void run(const char* name,
         void (*kernel)(TensorMap),
         const TensorMap& map,
         int threads = 160,
         int blocks = 1) {
    std::printf("@%s\n", name);
    std::fflush(stdout);
    cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                         cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    kernel<<<blocks, threads, kSharedBytes>>>(map);
    if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) {
        std::printf("%s: %s\n", name, cudaGetErrorString(error));
        ++failures;
    }
}

template <Write kWrite, Read kRead>
void run_exchange(const char* name, const TensorMap& map) {
    const auto of = [name](const char* kind) { return std::string(name) + kind; };
    run(of("").c_str(), exchange<kWrite, kRead, Early::kNone, Arrival::kLanes>, map);
    run(of(", early read").c_str(), exchange<kWrite, kRead, Early::kRead, Arrival::kLanes>, map);
    run(of(", early write").c_str(), exchange<kWrite, kRead, Early::kWrite, Arrival::kLanes>, map);
}

TensorMap make_map() {
    TensorMap map{};
    void *entry = nullptr, *data = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                     &found);
    cudaGetSymbolAddress(&data, source);
    const cuuint64_t extent[3] = {64, 1, 64}, strides[2] = {128, 128};
    const cuuint32_t box[3] = {64, 1, 64}, steps[3] = {1, 1, 1};
    const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
    failures +=
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, data, extent, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
            ? 0
            : 1;
    return map;
}

}  // namespace

int main() {
    const TensorMap map = make_map();
    using enum Arrival;
    constexpr auto kStore = Write::kStore;
    constexpr auto kLoad = Read::kLoad;
    run_exchange<kStore, kLoad>("store, load", map);
    run("lane 0 arrives", exchange<kStore, kLoad, Early::kNone, kLane0>, map);
    run("lane 0 waits", exchange<kStore, kLoad, Early::kNone, kLane0Waits>, map);
    run_exchange<Write::kMatrix, kLoad>("stmatrix, load", map);
    run_exchange<kStore, Read::kMatrix>("store, ldmatrix", map);
    run_exchange<kStore, Read::kProduct>("store, wgmma", map);
    run_exchange<kStore, Read::kCopy>("store, bulk store", map);
    run_exchange<Write::kBulk, kLoad>("bulk load, load", map);
    run_exchange<Write::kBulk, Read::kProduct>("bulk load, wgmma", map);
    run_exchange<Write::kBox, kLoad>("tensor load, load", map);
    run("bar.sync in turn", named_barriers<false>, map, 64);
    run("bar.arrive in turn", named_barriers<true>, map, 64);
    run("cluster copy", cluster_copy<Early::kNone>, map, 32, 2);
    run("cluster copy, early read", cluster_copy<Early::kRead>, map, 32, 2);
    run("cluster copy, early write", cluster_copy<Early::kWrite>, map, 32, 2);
    return failures;
}
