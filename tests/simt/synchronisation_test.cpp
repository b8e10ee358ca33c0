// Barriers, mbarriers, copies and clusters under the emulator, each for several orders of the
// scheduler.

#include <gtest/gtest.h>

#include "simt/test_kernels.h"

namespace hybridcp::simt {
namespace {

constexpr uint64_t kSeeds = 8;

TEST(Shuffles, MoveWordsBetweenLanes) {
    std::vector<uint32_t> results(128);
    launch({}, [&] {
        const uint32_t lane = device::lane_index();
        results[lane] = device::shuffle_xor(lane, 5);
        results[32 + lane] = device::shuffle_up(lane, 3);
        results[64 + lane] = device::shuffle_down(lane, 3);
        results[96 + lane] = device::shuffle(lane, lane * 3);
    });
    for (uint32_t lane = 0; lane < 32; ++lane) {
        EXPECT_EQ(results[lane], lane ^ 5);
        EXPECT_EQ(results[32 + lane], lane < 3 ? lane : lane - 3);
        EXPECT_EQ(results[64 + lane], lane > 28 ? lane : lane + 3);
        EXPECT_EQ(results[96 + lane], lane * 3 % 32);
    }
}

// Warps 0 and 1 write, warps 2 and 3 read: barrier 1 says full, barrier 2 says empty.
void barrier_kernel(std::vector<uint32_t>& sums) {
    static constexpr uint32_t kRounds = 5;
    const uint32_t base = device::shared_base();
    const uint32_t thread = device::thread_index();
    for (uint32_t round = 0; round < kRounds; ++round) {
        if (thread < 64) {
            if (round > 0) {
                device::barrier_sync(2, 128);
            }
            device::store_shared(base + thread * 4, thread + round * 100);
            device::barrier_arrive(1, 128);
        } else {
            device::barrier_sync(1, 128);
            sums[thread - 64] += device::load_shared<uint32_t>(base + (127 - thread) * 4);
            if (round + 1 < kRounds) {
                device::barrier_arrive(2, 128);
            }
        }
    }
}

TEST(NamedBarriers, HandOverInBothDirections) {
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
        std::vector<uint32_t> sums(64);
        launch({.threads = 128, .shared_bytes = 256, .seed = seed}, [&] { barrier_kernel(sums); });
        for (uint32_t i = 0; i < 64; ++i) {
            EXPECT_EQ(sums[i], 5 * (63 - i) + 1000) << "seed " << seed;
        }
    }
}

// A producer warp keeps a ring of 3 stages full; two consumer warps add what comes and store it by
// the copy engine.
void ring_kernel(const uint32_t* from, uint32_t* to) {
    static constexpr uint32_t kStages = 3;
    static constexpr uint32_t kItems = 20;
    static constexpr uint32_t kBytes = 256;  // an item: 64 words
    const uint32_t base = device::shared_base();
    const uint32_t result = base + kStages * kBytes;
    const uint32_t full = result + kBytes;
    const uint32_t empty = full + kStages * 8;
    if (device::thread_index() == 0) {
        for (uint32_t stage = 0; stage < kStages; ++stage) {
            device::mbarrier_init(full + stage * 8, 1);
            device::mbarrier_init(empty + stage * 8, 2);
        }
        device::fence_mbarrier_init();
    }
    device::sync_block();
    if (device::warp_index() == 2) {
        for (uint32_t item = 0; item < kItems && device::lane_index() == 0; ++item) {
            const uint32_t stage = item % kStages;
            device::mbarrier_wait_sleeping(empty + stage * 8, item / kStages % 2 ^ 1, 20);
            device::mbarrier_arrive_expect(full + stage * 8, kBytes);
            device::bulk_load(base + stage * kBytes, from + std::size_t{64} * item, kBytes,
                              full + stage * 8);
        }
        return;
    }
    uint32_t sum = 0;
    for (uint32_t item = 0; item < kItems; ++item) {
        const uint32_t stage = item % kStages;
        while (!device::mbarrier_try_wait(full + stage * 8, item / kStages % 2)) {
        }
        sum += device::load_shared<uint32_t>(base + stage * kBytes + device::thread_index() * 4);
        device::sync_warp();
        if (device::lane_index() == 0) {
            device::mbarrier_arrive(empty + stage * 8);
        }
    }
    device::store_shared(result + device::thread_index() * 4, sum);
    device::fence_proxy_async();
    device::barrier_sync(1, 64);
    if (device::thread_index() == 0) {
        device::bulk_store(to, result, kBytes);
        device::bulk_commit();
        device::bulk_wait_read<0>();
        device::bulk_wait<0>();
    }
}

TEST(Mbarriers, ProducerAndConsumersShareARing) {
    std::vector<uint32_t> from(1280);
    for (uint32_t i = 0; i < from.size(); ++i) {
        from[i] = i * i;
    }
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
        std::vector<uint32_t> to(64);
        launch({.threads = 96,
                .shared_bytes = 4 * 256 + 48,
                .seed = seed,
                .buffers = {{from.data(), from.size() * 4, false}, {to.data(), 256}}},
               [&] { ring_kernel(from.data(), to.data()); });
        for (uint32_t i = 0; i < 64; ++i) {
            uint32_t sum = 0;
            for (uint32_t item = 0; item < 20; ++item) {
                sum += from[item * 64 + i];
            }
            EXPECT_EQ(to[i], sum) << "seed " << seed;
        }
    }
}

// Each block of a cluster of 2 loads half of a tile for both, and sends its partner a word and 64
// bytes.
void cluster_kernel(const TensorMap& map, uint32_t* results) {
    const uint32_t base = device::shared_base();
    const uint32_t source = base + 4096;
    const uint32_t target = source + 64;
    const uint32_t word = target + 64;
    const uint32_t loads = word + 8;
    const uint32_t copies = loads + 8;
    const uint32_t rank = device::cluster_rank();
    const uint32_t peer = rank ^ 1;
    const uint32_t lane = device::lane_index();
    if (lane == 0) {
        device::mbarrier_init(loads, 1);
        device::mbarrier_init(copies, 2);
        device::fence_mbarrier_init();
        device::mbarrier_arrive_expect(loads, 4096);
    }
    if (lane < 16) {
        device::store_shared(source + lane * 4, 1000 * (rank + 1) + lane);
    }
    device::fence_proxy_async();
    device::sync_warp();
    device::cluster_arrive();
    device::cluster_wait();
    if (lane == 0) {
        device::tensor_load_multicast(base + rank * 2048, &map, loads,
                                      {0, 0, static_cast<int32_t>(rank * 16)}, 3);
        device::mbarrier_arrive_expect(copies, 64);
        device::bulk_copy_cluster(device::map_shared(target, peer), source, 64,
                                  device::map_shared(copies, peer));
        device::store_cluster(device::map_shared(word, peer), 77 + rank);
        device::fence_cluster();
        device::mbarrier_arrive_cluster(device::map_shared(copies, peer));
    }
    device::mbarrier_wait(loads, 0);
    device::mbarrier_wait(copies, 0);
    uint32_t sum = device::load_shared<uint32_t>(word);
    sum += device::load_shared<uint32_t>(target + lane % 16 * 4);
    const uint32_t row = device::swizzle_128(base + lane * 128);
    sum += device::load_shared<uint16_t>(row) * 10000;
    sum += device::load_cluster<uint32_t>(device::map_shared(source, peer)) * 100;
    device::store_global(&results[device::block_index() * 32 + lane], sum);
    device::cluster_arrive();
    device::cluster_wait();
}

// Each lane sends its partner 16 bytes, twice to the same place.
void send_kernel(float* results) {
    const uint32_t target = device::shared_base(), full = target + 512, empty = full + 8;
    const uint32_t rank = device::cluster_rank(), peer = rank ^ 1, lane = device::lane_index();
    if (lane == 0) {
        device::mbarrier_init(full, 1);
        device::mbarrier_init(empty, 1);
        device::fence_mbarrier_init();
    }
    device::cluster_arrive();
    device::cluster_wait();
    for (uint32_t turn = 0; turn < 2; ++turn) {
        const float first = static_cast<float>(100 * (rank + 1) + lane + 1000 * turn);
        device::mbarrier_wait(empty, turn ^ 1);
        device::store_cluster_async(device::map_shared(target + 16 * lane, peer),
                                    {first, -first, 2 * first, 0.5F},
                                    device::map_shared(full, peer));
        if (lane == 0) {
            device::mbarrier_arrive_expect(full, 512);
        }
        device::mbarrier_wait(full, turn);
        const auto got = device::load_shared<device::Float4>(target + 16 * lane);
        device::store_global(&results[(device::block_index() * 2 + turn) * 32 + lane],
                             got.x + got.y + got.z + got.w);
        device::sync_warp();
        if (lane == 0) {
            device::mbarrier_arrive_cluster(device::map_shared(empty, peer));
        }
    }
    device::cluster_arrive();
    device::cluster_wait();
}

TEST(Clusters, AsynchronousStores) {
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
        std::vector<float> results(256);
        launch({.blocks = 4, .cluster = 2, .shared_bytes = 528, .seed = seed},
               [&] { send_kernel(results.data()); });
        for (uint32_t i = 0; i < 256; ++i) {
            const uint32_t peer = i / 64 % 2 ^ 1;
            const uint32_t first = 100 * (peer + 1) + i % 32 + 1000 * (i / 32 % 2);
            EXPECT_EQ(results[i], static_cast<float>(2 * first) + 0.5F)
                << "seed " << seed << " value " << i;
        }
    }
}

TEST(Clusters, MulticastCopyAndRemoteArrival) {
    Matrix matrix(32, 64);
    for (uint32_t row = 0; row < 32; ++row) {
        matrix.bits[std::size_t{64} * row] = static_cast<uint16_t>(row + 1);
    }
    const TensorMap map = matrix.map(16);
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
        std::vector<uint32_t> results(128);
        launch({.blocks = 4, .cluster = 2, .shared_bytes = 4096 + 160, .seed = seed},
               [&] { cluster_kernel(map, results.data()); });
        for (uint32_t i = 0; i < 128; ++i) {
            const uint32_t peer = i / 32 % 2 ^ 1;
            const uint32_t lane = i % 32;
            const uint32_t first = 1000 * (peer + 1);
            EXPECT_EQ(results[i], 77 + peer + first + lane % 16 + (lane + 1) * 10000 + first * 100)
                << "seed " << seed << " value " << i;
        }
    }
}

// Copies a tensor of 20 rows by boxes of 16, in place of the second of which 12 rows lie outside.
void tensor_copy_kernel(const TensorMap& from, const TensorMap& to) {
    const uint32_t base = device::shared_base();
    const uint32_t barrier = base + 2048;
    if (device::lane_index() != 0) {
        return;
    }
    device::mbarrier_init(barrier, 1);
    device::fence_mbarrier_init();
    for (uint32_t box = 0; box < 2; ++box) {
        const auto row = static_cast<int32_t>(16 * box);
        device::mbarrier_arrive_expect(barrier, 2048);
        device::tensor_load(base, &from, barrier, {0, 0, row});
        device::mbarrier_wait(barrier, box);
        for (uint32_t i = 0; i < 512; ++i) {  // generic writes between two of the copy engine
            const uint32_t word = device::load_shared<uint32_t>(base + i * 4);
            EXPECT_TRUE(box == 0 || i < 4 * 32 || word == 0) << "zeros outside the tensor";
            device::store_shared(base + i * 4, word);
        }
        device::fence_proxy_async();
        device::tensor_store(&to, base, {0, 0, row}, 2048);
        device::bulk_commit();
        device::bulk_wait_read<0>();
    }
    device::bulk_wait<0>();
}

TEST(Tensors, ZerosOutsideAndStoresInside) {
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
        Matrix from = Matrix::numbered(20, 64);
        Matrix to(20, 64);
        const TensorMap map_from = from.map(16);
        const TensorMap map_to = to.map(16);
        launch({.shared_bytes = 2064,
                .seed = seed,
                .buffers = {{from.bits.data(), from.bits.size() * 2, false},
                            {to.bits.data(), to.bits.size() * 2}}},
               [&] { tensor_copy_kernel(map_from, map_to); });
        EXPECT_EQ(from.bits, to.bits) << "seed " << seed;
    }
}

TEST(Launch, BlocksSeeTheirIndices) {
    std::vector<uint32_t> seen(384);
    launch({.blocks = 3, .blocks_y = 2, .threads = 64}, [&] {
        const uint32_t block =
            device::block_index_y() * device::grid_blocks() + device::block_index();
        seen[block * device::block_threads() + device::thread_index()] += device::warp_index() + 1;
    });
    for (uint32_t i = 0; i < seen.size(); ++i) {
        EXPECT_EQ(seen[i], i / 32 % 2 + 1);
    }
}

}  // namespace
}  // namespace hybridcp::simt
