// Typed loads and stores of shared and global memory, and the checks at the end of a cluster.

#include <fmt/format.h>

#include "simt/bulk_stores.h"
#include "simt/device_memory.h"
#include "simt/places.h"

namespace hybridcp::simt {

// A block must not exit before others have reached into it: one of its threads must know when they
// did.
void Engine::check_reached(const Block& block) const {
    for (const auto& other : blocks_) {
        for (const Thread& thread : other->threads) {
            const uint32_t time = block.reached[thread.clock.id];
            bool known = time == 0;
            for (std::size_t i = 0; i < block.threads.size() && !known; ++i) {
                known = block.threads[i].clock.knows(thread.clock.id, time);
            }
            if (!known) {
                throw Fault(thread_text(thread) + ": reaches block " + std::to_string(block.index) +
                            ", which may have exited by then");
            }
        }
    }
}

void Engine::check_end() const {
    for (const auto& block : blocks_) {
        check_reached(*block);
        for (const Warp& warp : block->warps) {
            if (!warp.products.idle()) {
                throw Fault(thread_text(*warp.lanes[0]) +
                            ": exits with products of wgmma in flight");
            }
            if (warp.products.issued() != block->product_log[warp.index / 4].size()) {
                throw Fault(thread_text(*warp.lanes[0]) +
                            ": diverges: issued fewer products than its warpgroup");
            }
        }
        for (const Thread& thread : block->threads) {
            if (!thread.stores.empty() && thread.stores.back()->unread > 0) {
                throw Fault(thread_text(thread) + ": exits with bulk stores not committed");
            }
        }
    }
}

}  // namespace hybridcp::simt

namespace hybridcp::device {

using simt::at;
using simt::Engine;

namespace {

// Rarely, since there are many accesses; spinning on memory alone still lets others run.
constexpr uint32_t kYieldAtAccesses = 256;

}  // namespace

uint32_t shared_base() {
    return simt::kSharedStart;
}

void read_shared(uint32_t address, void* to, uint32_t bytes, const Site& site) {
    const auto& origin = at("load_shared", site);
    const simt::Place place = simt::own_place(address, bytes, bytes);
    Engine::current().maybe_yield(kYieldAtAccesses);
    place.block->memory.read(place.offset, to, bytes, origin);
}

void write_shared(uint32_t address, const void* from, uint32_t bytes, const Site& site) {
    const auto& origin = at("store_shared", site);
    const simt::Place place = simt::own_place(address, bytes, bytes);
    Engine::current().maybe_yield(kYieldAtAccesses);
    place.block->memory.write(place.offset, from, bytes, origin);
}

void read_cluster(uint32_t address, void* to, uint32_t bytes, const Site& site) {
    const auto& origin = at("load_cluster", site);
    const simt::Place place = simt::cluster_place(address, bytes, bytes);
    Engine::current().maybe_yield(kYieldAtAccesses);
    place.block->memory.read(place.offset, to, bytes, origin);
}

void write_cluster(uint32_t address, const void* from, uint32_t bytes, const Site& site) {
    const auto& origin = at("store_cluster", site);
    const simt::Place place = simt::cluster_place(address, bytes, bytes);
    Engine::current().maybe_yield(kYieldAtAccesses);
    place.block->memory.write(place.offset, from, bytes, origin);
}

void check_global_access(const void* address, uint32_t bytes, bool write, const Site& site) {
    const auto& origin = at(write ? "store_global" : "load_global", site);
    if (reinterpret_cast<std::uintptr_t>(address) % bytes != 0) {
        simt::fault(origin, fmt::format("is misaligned: {} is no multiple of {}", address, bytes));
    }
    simt::check_global(address, bytes, write, origin);
    Engine::current().maybe_yield(kYieldAtAccesses);
}

}  // namespace hybridcp::device
