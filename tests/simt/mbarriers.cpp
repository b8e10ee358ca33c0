// The mbarrier primitives.

#include "simt/device_synchronisation.h"
#include "simt/places.h"

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
    if (rank >= Engine::current().options().cluster) {
        simt::fault(origin, "names a block outside the cluster");
    }
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
