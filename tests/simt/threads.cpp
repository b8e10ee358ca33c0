// Indices, shuffles, pairs of numbers and barriers of the primitives.

#include <algorithm>

#include "simt/collective.h"
#include "simt/device_synchronisation.h"
#include "simt/places.h"

namespace hybridcp::device {

using simt::at;
using simt::Engine;

namespace {

simt::Thread& self() {
    return Engine::current().thread();
}

// Barriers are where races hide: others may run first.
constexpr uint32_t kYieldAtBarriers = 4;

void arrive_at_barrier(uint32_t id, uint32_t threads) {
    struct Operands {
        uint32_t id, threads;
    } mine{id, threads};
    simt::warp_collective(mine, [&](const auto& lanes) {
        for (const Operands* lane : lanes) {
            if (lane->id != id || lane->threads != threads) {
                simt::fault(self().origin, "diverges: its lanes name different barriers");
            }
        }
        if (id >= self().block->barriers.size()) {
            simt::fault(self().origin, "names a barrier above 15");
        }
        self().block->barriers[id].arrive(id, threads, *self().warp);
    });
}

void sync_at_barrier(uint32_t id, uint32_t threads) {
    simt::NamedBarrier& barrier = self().block->barriers[id % 16];
    const uint64_t generation = barrier.generation();
    arrive_at_barrier(id, threads);
    while (barrier.generation() == generation) {
        Engine::current().wait(barrier);
    }
    barrier.leave(self().clock);
}

}  // namespace

uint32_t thread_index() {
    return self().index;
}
uint32_t block_threads() {
    return Engine::current().options().threads;
}
uint32_t block_index() {
    return self().block->index;
}
uint32_t block_index_y() {
    return self().block->index_y;
}
uint32_t grid_blocks() {
    return Engine::current().options().blocks;
}
uint32_t cluster_rank() {
    return self().block->rank;
}

uint32_t shuffle_word(Shuffle kind, uint32_t value, uint32_t argument, const Site& site) {
    at("shuffle", site);
    struct Operands {
        Shuffle kind;
        uint32_t value, argument, result;
    } mine{kind, value, argument, value};
    simt::warp_collective(mine, [&](const auto& lanes) {
        for (uint32_t lane = 0; lane < simt::kWarpThreads; ++lane) {
            Operands& own = *lanes[lane];
            if (own.kind != kind) {
                simt::fault(self().origin, "diverges: its lanes shuffle in different ways");
            }
            const uint32_t source = own.kind == Shuffle::kXor  ? lane ^ own.argument
                                    : own.kind == Shuffle::kUp ? lane - own.argument
                                    : own.kind == Shuffle::kDown
                                        ? lane + own.argument
                                        : own.argument % simt::kWarpThreads;
            own.result = source < simt::kWarpThreads ? lanes[source]->value : own.value;
        }
    });
    return mine.result;
}

uint32_t multiply_bf16(uint32_t a, uint32_t b) {
    const Float2 x = unpack_bf16(a), y = unpack_bf16(b);
    return pack_bf16(x.x * y.x, x.y * y.y);
}
uint32_t larger_bf16(uint32_t a, uint32_t b) {
    const Float2 x = unpack_bf16(a), y = unpack_bf16(b);
    const uint32_t larger = pack_bf16(std::fmax(std::fabs(x.x), std::fabs(y.x)),
                                      std::fmax(std::fabs(x.y), std::fabs(y.y)));
    return larger | ((a ^ b) & 0x80008000U);
}

void set_registers(int count, const Site& site) {
    at("setmaxnreg", site);
    simt::warp_collective(count, [](const auto&) {});
}

void sleep_ns(uint32_t, const Site& site) {
    at("sleep_ns", site);
    Engine::current().maybe_yield(1);
}

uint64_t clock_cycles() {
    return Engine::current().turns();
}

void sync_block(const Site& site) {
    at("sync_block", site);
    sync_at_barrier(0, Engine::current().options().threads);
}

void sync_warp(const Site& site) {
    at("sync_warp", site);
    int nothing = 0;
    simt::warp_collective(nothing, [](const auto&) {});
}

void barrier_sync(uint32_t id, uint32_t threads, const Site& site) {
    at("barrier_sync", site);
    sync_at_barrier(id, threads);
}

void barrier_arrive(uint32_t id, uint32_t threads, const Site& site) {
    at("barrier_arrive", site);
    arrive_at_barrier(id, threads);
    Engine::current().maybe_yield(kYieldAtBarriers);
}

void cluster_arrive(const Site& site) {
    at("cluster_arrive", site);
    int nothing = 0;
    simt::warp_collective(nothing, [](const auto&) {});
    Engine& engine = Engine::current();
    engine.cluster_barrier().arrive(engine.live_threads());
}

void cluster_wait(const Site& site) {
    const auto& origin = at("cluster_wait", site);
    int nothing = 0;
    simt::warp_collective(nothing, [](const auto&) {});
    if (self().cluster_generation < 0) {
        simt::fault(origin, "comes without cluster_arrive");
    }
    simt::ClusterBarrier& barrier = Engine::current().cluster_barrier();
    while (barrier.generation() == self().cluster_generation) {
        Engine::current().wait(barrier);
    }
    self().cluster_generation = -1;
    barrier.acquire(self().clock);
}

void fence_mbarrier_init(const Site& site) {
    at("fence_mbarrier_init", site);
    ++self().init_fences;
}

void fence_proxy_async(const Site& site) {
    at("fence_proxy_async", site);
    self().proxy_fences.push_back(self().clock.time);
    self().clock.touched = true;
    ++self().init_fences;
}

void fence_cluster(const Site& site) {
    at("fence_cluster", site);
}

}  // namespace hybridcp::device
