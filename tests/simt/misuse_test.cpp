// Each misuse of the machine that the emulator knows is reported, with the operation and the place.

#include <gtest/gtest.h>

#include "simt/test_kernels.h"

namespace hybridcp::simt {
namespace {

using device::Major;
using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

// Whether one warp, or what the options say, ends in a fault whose message contains `part`.
AssertionResult reports(const std::string& part,
                        const std::function<void()>& kernel,
                        LaunchOptions options = {}) {
    options.shared_bytes = 16384;
    const std::string message = fault_of(options, kernel);
    if (message.find(part) == std::string::npos) {
        return AssertionFailure() << "expected \"" << part << "\" in: " << message;
    }
    return AssertionSuccess();
}

uint32_t base() {
    return device::shared_base();
}
bool first_thread() {
    return device::thread_index() == 0;
}
constexpr uint32_t kBarrier = 8192;  // offset of the mbarrier of these kernels

void make_barrier(uint32_t arrivals) {
    if (first_thread()) {
        device::mbarrier_init(base() + kBarrier, arrivals);
        device::fence_mbarrier_init();
    }
    device::sync_block();
}

TEST(NoProgress, NamesTheMbarrierOfEachWarp) {
    const auto kernel = [] {
        make_barrier(2);
        if (device::warp_index() == 1) {
            device::mbarrier_wait(base() + kBarrier, 0);
        } else {
            device::barrier_sync(3, 64);
        }
    };
    const LaunchOptions options{.threads = 64};
    EXPECT_TRUE(reports("no thread can make progress", kernel, options));
    EXPECT_TRUE(reports("warp 1 lanes 0-31: mbarrier_wait at misuse_test.cpp", kernel, options));
    EXPECT_TRUE(reports(
        "(base + 8192), waits for the end of parity 0; it is in phase 0, which lacks 2 of 2 "
        "arrivals",
        kernel, options));
    EXPECT_TRUE(reports("barrier 3, 32 of 64 threads there", kernel, options));
}

TEST(NoProgress, EndsEndlessPolling) {
    EXPECT_TRUE(
        reports("too many turns",
                [] {
                    device::store_shared(base() + device::lane_index() * 4, 0U);
                    while (device::load_shared<uint32_t>(base() + device::lane_index() * 4) == 0) {
                    }
                },
                {.most_steps = 10000}));
}

TEST(Mbarrier, Misuse) {
    EXPECT_TRUE(reports("lacks 0 of 1 arrivals and 64 bytes", [] {
        make_barrier(1);
        if (first_thread()) {
            device::mbarrier_arrive_expect(base() + kBarrier, 64);
        }
        device::mbarrier_wait(base() + kBarrier, 0);
    }));
    EXPECT_TRUE(reports("arrives once too often", [] {
        make_barrier(1);
        if (first_thread()) {
            device::mbarrier_arrive_expect(base() + kBarrier, 64);
            device::mbarrier_arrive(base() + kBarrier);
        }
    }));
    EXPECT_TRUE(reports("finds no mbarrier", [] { device::mbarrier_arrive(base() + kBarrier); }));
    EXPECT_TRUE(reports("where an mbarrier lies", [] {
        make_barrier(1);
        device::store_shared(base() + kBarrier, 0U);
    }));
    const std::vector<uint32_t> data(4);
    EXPECT_TRUE(reports("has not called fence_mbarrier_init", [&] {
        if (first_thread()) {
            device::mbarrier_init(base() + kBarrier, 1);
            device::mbarrier_arrive_expect(base() + kBarrier, 16);
            device::bulk_load(base(), data.data(), 16, base() + kBarrier);
        }
    }));
}

TEST(SharedMemory, Misuse) {
    EXPECT_TRUE(reports("nobody has written", [] { device::load_shared<float>(base()); }));
    EXPECT_TRUE(reports("out of bounds", [] { device::store_shared(base() + 16384, 1.0F); }));
    EXPECT_TRUE(reports("out of bounds", [] { device::store_shared(base() - 4, 1.0F); }));
    EXPECT_TRUE(reports("misaligned", [] { device::store_shared(base() + 2, 1.0F); }));
    EXPECT_TRUE(reports("address from map_shared",
                        [] { device::store_shared(device::map_shared(base(), 0), 1.0F); }));
    EXPECT_TRUE(reports("names a block outside the cluster", [] { device::map_shared(base(), 2); },
                        {.blocks = 2, .cluster = 2}));
    EXPECT_TRUE(reports("which may have exited by then",
                        [] {
                            if (device::cluster_rank() == 0) {
                                device::store_cluster(
                                    device::map_shared(base() + device::lane_index() * 4, 1), 1.0F);
                            } else {
                                for (int i = 0; i < 1000; ++i) {
                                    device::sleep_ns(1);
                                }
                            }
                        },
                        {.blocks = 2, .cluster = 2}));
    EXPECT_TRUE(reports("which has exited",
                        [] {
                            if (device::cluster_rank() == 0) {
                                for (int i = 0; i < 1000; ++i) {
                                    device::sleep_ns(1);
                                }
                                device::store_cluster(device::map_shared(base(), 1), 1.0F);
                            }
                        },
                        {.blocks = 2, .cluster = 2}));
}

TEST(GlobalMemory, Misuse) {
    std::vector<float> data(8);
    const LaunchOptions options{.buffers = {{data.data(), 32, false}}};
    EXPECT_TRUE(reports("out of bounds", [&] { device::load_global(data.data() + 8); }, options));
    EXPECT_TRUE(
        reports("out of bounds", [&] { device::prefetch_global(data.data() + 8); }, options));
    EXPECT_TRUE(reports("read-only", [&] { device::store_global(data.data(), 1.0F); }, options));
    EXPECT_TRUE(reports("misaligned", [&] {
        device::load_global(
            reinterpret_cast<const float*>(reinterpret_cast<const std::byte*>(data.data()) + 2));
    }));
}

TEST(TensorStores, OtherBytesThanTheBox) {
    std::vector<std::uint16_t> data(1024);
    const TensorMap map = {.data = reinterpret_cast<std::byte*>(data.data()),
                           .extent = {64, 1, 16},
                           .stride_bytes = {128, 128},
                           .box = {64, 1, 16}};
    EXPECT_TRUE(reports("its box has 2048", [&] {
        if (first_thread()) {
            device::tensor_store(&map, base(), {0, 0, 0});
        }
    }));
}

TEST(Collectives, Divergence) {
    EXPECT_TRUE(reports("diverges", [] {
        if (device::lane_index() < 7) {
            device::sync_warp();
        } else {
            device::shuffle_xor(1U, 1);
        }
    }));
    EXPECT_TRUE(reports("with 31 of 32 lanes there", [] {
        make_barrier(1);
        if (device::lane_index() == 5) {
            device::mbarrier_wait(base() + kBarrier, 0);
        }
        device::sync_warp();
    }));
    EXPECT_TRUE(reports("needs the whole warp", [] {
        if (device::lane_index() != 5) {
            device::sleep_ns(1);
            device::sync_warp();
        }
    }));
    EXPECT_TRUE(reports("threads at barrier 1, where other warps count",
                        [] { device::barrier_sync(1, device::warp_index() == 0 ? 64 : 96); },
                        {.threads = 96}));
}

TEST(Copies, Misuse) {
    const std::vector<uint32_t> data(64);
    const auto load = [&] {
        make_barrier(1);
        if (first_thread()) {
            device::mbarrier_arrive_expect(base() + kBarrier, 256);
            device::bulk_load(base(), data.data(), 256, base() + kBarrier);
        }
        device::sync_block();
    };
    bool caught = false;
    for (uint64_t seed = 0; seed < 8 && !caught; ++seed) {
        caught = static_cast<bool>(reports("copy in flight is writing",
                                           [&] {
                                               load();
                                               device::load_shared<uint32_t>(base());
                                           },
                                           {.seed = seed}));
    }
    EXPECT_TRUE(caught) << "a read before the copy has arrived";
    std::vector<uint32_t> out(64);
    const auto store = [&](bool fence, bool wait) {
        device::store_shared(base() + device::lane_index() * 4, 1U);
        if (fence) {
            device::fence_proxy_async();
        }
        device::sync_warp();
        if (first_thread()) {
            device::bulk_store(out.data(), base(), 128);
            device::bulk_commit();
            if (wait) {
                device::bulk_wait_read<0>();
            }
            device::store_shared(base(), 2U);
        }
    };
    EXPECT_TRUE(reports("stored without fence_proxy_async", [&] { store(false, true); }));
    EXPECT_TRUE(reports("not yet waited for, is reading", [&] { store(true, false); }));
    EXPECT_EQ(fault_of({.shared_bytes = 1024}, [&] { store(true, true); }), "");
    EXPECT_TRUE(reports("misaligned", [&] { device::bulk_store(out.data() + 1, base(), 16); }));
}

// A product of tiles of ones, right but for what the flags leave out.
struct ProductFlaws {
    bool proxy_fence = true, fence = true, wait = true, early_write = false, one_warp_less = false;
};

void flawed_product(ProductFlaws flaws, std::vector<float>& sums) {
    for (uint32_t i = device::thread_index(); i < 2048; i += 128) {
        device::store_shared(base() + i * 4, 0x3f803f80U);
    }
    if (flaws.proxy_fence) {
        device::fence_proxy_async();
    }
    device::sync_block();
    if (flaws.one_warp_less && device::warp_index() == 2) {
        return;
    }
    if (flaws.fence) {
        device::wgmma_fence();
    }
    float d[32];
    const uint64_t tile = device::matrix_descriptor(base(), 16, 1024);
    device::wgmma_shared<Major::kK, Major::kK>(d, tile, tile, false);
    device::wgmma_commit();
    if (flaws.early_write) {
        device::store_shared(base(), 0U);
    }
    if (flaws.wait) {
        device::wgmma_wait<0>();
    }
    sums[device::thread_index()] = d[31];
}

TEST(Wgmma, Misuse) {
    std::vector<float> sums(128);
    const LaunchOptions options{.threads = 128};
    const auto with = [&](ProductFlaws flaws) {
        return [&, flaws] { flawed_product(flaws, sums); };
    };
    EXPECT_EQ(fault_of({.threads = 128, .shared_bytes = 8192}, with({})), "");
    EXPECT_EQ(sums[77], 16.0F);
    EXPECT_TRUE(reports("stored without fence_proxy_async", with({.proxy_fence = false}), options));
    EXPECT_TRUE(reports("no wgmma_fence", with({.fence = false}), options));
    EXPECT_TRUE(reports("exits with products of wgmma in flight", with({.wait = false}), options));
    EXPECT_TRUE(std::isnan(sums[77])) << "sums that nobody waited for";
    EXPECT_TRUE(reports("not yet waited for, is reading", with({.early_write = true}), options));
    EXPECT_TRUE(reports("issued fewer products", with({.one_warp_less = true}), options));
}

// Two warps exchange words; what `order` says comes between the stores and the loads.
void exchange(const std::function<void()>& order) {
    const uint32_t thread = device::thread_index();
    device::store_shared(base() + thread * 4, thread);
    order();
    EXPECT_EQ(device::load_shared<uint32_t>(base() + (thread ^ 33) * 4), thread ^ 33);
}

TEST(Races, AreReportedInAnyOrder) {
    for (uint64_t seed = 0; seed < 16; ++seed) {
        const LaunchOptions options{.threads = 64, .seed = seed};
        // Which of the two came first decides what the message says of it.
        EXPECT_TRUE(reports("reads shared memory", [] { exchange([] {}); }, options));
        EXPECT_TRUE(
            reports("reads shared memory", [] { exchange([] { device::sync_warp(); }); }, options));
        EXPECT_TRUE(reports(
            "with no barrier between",
            [] {
                exchange([] { device::sync_block(); });
                device::store_shared(base() + device::thread_index() * 4, 0U);
            },
            options));
        EXPECT_EQ(fault_of({.threads = 64, .shared_bytes = 256, .seed = seed},
                           [] { exchange([] { device::sync_block(); }); }),
                  "");
    }
}

TEST(Races, AnArrivalHandsOverItsOwnThreadAlone) {
    EXPECT_TRUE(reports("wrote with no barrier between",
                        [] {
                            make_barrier(1);
                            if (device::warp_index() == 0) {
                                device::store_shared(base() + device::lane_index() * 4, 1U);
                                // here sync_warp is missing
                                if (first_thread()) {
                                    for (int i = 0; i < 100; ++i) {
                                        device::sleep_ns(1);
                                    }
                                    device::mbarrier_arrive(base() + kBarrier);
                                }
                            } else {
                                device::mbarrier_wait(base() + kBarrier, 0);
                                device::load_shared<uint32_t>(base() + device::lane_index() * 4);
                            }
                        },
                        {.threads = 64}));
}

TEST(Races, TheFenceComesBeforeTheBarrier) {
    std::vector<uint32_t> out(32);
    EXPECT_TRUE(reports("without fence_proxy_async before the barrier", [&] {
        device::store_shared(base() + device::lane_index() * 4, 1U);
        device::sync_warp();
        device::fence_proxy_async();  // too late for what lane 0 may have read already
        if (first_thread()) {
            device::sleep_ns(1);
            device::bulk_store(out.data(), base(), 128);
        }
    }));
}

}  // namespace
}  // namespace hybridcp::simt
