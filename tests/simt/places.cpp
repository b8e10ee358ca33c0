#include "simt/places.h"

#include <fmt/format.h>

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

void check_global(const void* address, std::size_t bytes, bool write, const Origin& origin) {
    const auto& buffers = Engine::current().options().buffers;
    const auto first = reinterpret_cast<std::uintptr_t>(address);
    for (const Buffer& buffer : buffers) {
        const auto start = reinterpret_cast<std::uintptr_t>(buffer.data);
        if (first >= start && first - start <= buffer.bytes &&
            bytes <= buffer.bytes - (first - start)) {
            if (write && !buffer.writable) {
                fault(origin, "writes a buffer that the launch names read-only");
            }
            return;
        }
    }
    if (!buffers.empty()) {
        fault(origin, fmt::format("is out of bounds: {} bytes at {} lie in no buffer of the launch",
                                  bytes, address));
    }
}

}  // namespace hybridcp::simt
