// The mbarrier primitives, and what addresses name.

#include <fmt/format.h>

#include "simt/device_memory.h"
#include "simt/device_synchronisation.h"
#include "simt/engine.h"

namespace hybridcp::simt {
namespace {

Place place_in(Block& block, uint32_t address, uint32_t bytes, uint32_t alignment) {
    const Origin& origin = Engine::current().thread().origin;
    const uint32_t window = address & ((1U << kRankShift) - 1);
    if (window < kSharedStart || window - kSharedStart > block.memory.bytes() ||
        bytes > block.memory.bytes() - (window - kSharedStart)) {
        fault(origin, fmt::format("is out of bounds: {} bytes at {:#x}, where shared memory has {} "
                                  "from {:#x}",
                                  bytes, window, block.memory.bytes(), kSharedStart));
    }
    if (address % alignment != 0) {
        fault(origin,
              fmt::format("is misaligned: address {:#x} is no multiple of {}", window, alignment));
    }
    return {&block, window - kSharedStart};
}

}  // namespace

const Origin& at(const char* operation, const std::source_location& site) {
    Thread& thread = Engine::current().thread();
    thread.origin = {&thread, operation, site};
    return thread.origin;
}

Place own_place(uint32_t address, uint32_t bytes, uint32_t alignment) {
    const Thread& thread = Engine::current().thread();
    if (address >> kRankShift != 0) {
        fault(thread.origin, fmt::format("gets {:#x}, an address from map_shared", address));
    }
    return place_in(*thread.block, address, bytes, alignment);
}

Place cluster_place(uint32_t address, uint32_t bytes, uint32_t alignment) {
    Engine& engine = Engine::current();
    const Thread& thread = engine.thread();
    const uint32_t rank = address >> kRankShift;
    Block& block = rank == 0 ? *thread.block : engine.block_of_rank(rank - 1, thread.origin);
    if (block.live_threads == 0) {
        fault(thread.origin, fmt::format("reaches block {}, which has exited", block.index));
    }
    return place_in(block, address, bytes, alignment);
}

Mbarrier& find_mbarrier(const Place& place, const Origin& origin) {
    const auto found = place.block->mbarriers.find(place.offset);
    if (found == place.block->mbarriers.end()) {
        fault(origin, "finds no mbarrier at " + shared_text(place.offset));
    }
    if (place.block != origin.thread->block) {
        found->second.check_visible(origin);
    }
    return found->second;
}

}  // namespace hybridcp::simt

namespace hybridcp::device {

using simt::at;
using simt::Engine;

namespace {

constexpr uint32_t kMbarrierBytes = 8;
// Of the random moments at which other warps may come first.
constexpr uint32_t kYieldAtArrivals = 4;
constexpr uint32_t kEarlyReturns = 16;

simt::Mbarrier& own_mbarrier(uint32_t address, const simt::Origin& origin) {
    return find_mbarrier(simt::own_place(address, kMbarrierBytes, kMbarrierBytes), origin);
}

}  // namespace

uint32_t map_shared(uint32_t address, uint32_t rank, const Site& site) {
    const auto& origin = at("map_shared", site);
    (void)simt::own_place(address, 1, 1);
    (void)Engine::current().block_of_rank(rank, origin);
    return address | (rank + 1) << simt::kRankShift;
}

void mbarrier_init(uint32_t barrier, uint32_t arrivals, const Site& site) {
    const auto& origin = at("mbarrier_init", site);
    const simt::Place place = simt::own_place(barrier, kMbarrierBytes, kMbarrierBytes);
    place.block->memory.place_mbarrier(place.offset, origin);
    if (arrivals == 0 || arrivals >= 1U << 20) {
        simt::fault(origin, "needs 1 to 2^20 - 1 arrivals");
    }
    place.block->mbarriers.try_emplace(place.offset, place.offset, arrivals, *origin.thread);
}

void mbarrier_arrive(uint32_t barrier, const Site& site) {
    const auto& origin = at("mbarrier_arrive", site);
    own_mbarrier(barrier, origin).arrive(origin);
    Engine::current().maybe_yield(kYieldAtArrivals);
}

void mbarrier_arrive_cluster(uint32_t barrier, const Site& site) {
    const auto& origin = at("mbarrier_arrive_cluster", site);
    find_mbarrier(simt::cluster_place(barrier, kMbarrierBytes, kMbarrierBytes), origin)
        .arrive(origin);
    Engine::current().maybe_yield(kYieldAtArrivals);
}

void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes, const Site& site) {
    const auto& origin = at("mbarrier_arrive_expect", site);
    simt::Mbarrier& found = own_mbarrier(barrier, origin);
    found.expect(bytes, origin);
    found.arrive(origin);
    Engine::current().maybe_yield(kYieldAtArrivals);
}

void mbarrier_expect(uint32_t barrier, uint32_t bytes, const Site& site) {
    const auto& origin = at("mbarrier_expect", site);
    own_mbarrier(barrier, origin).expect(bytes, origin);
}

bool mbarrier_try_wait(uint32_t barrier, uint32_t parity, const Site& site) {
    const auto& origin = at("mbarrier_try_wait", site);
    Engine& engine = Engine::current();
    if (!own_mbarrier(barrier, origin).ended(parity) && engine.one_in(kEarlyReturns)) {
        engine.maybe_yield(1);
        return false;
    }
    mbarrier_wait(barrier, parity, site);
    return true;
}

void mbarrier_wait(uint32_t barrier, uint32_t parity, const Site& site) {
    const auto& origin = at("mbarrier_wait", site);
    simt::Mbarrier& found = own_mbarrier(barrier, origin);
    Engine& engine = Engine::current();
    engine.thread().parity = parity;
    while (!found.ended(parity)) {
        engine.wait(found);
    }
    found.acquire(engine.thread().clock);
}

}  // namespace hybridcp::device
