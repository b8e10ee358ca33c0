// The copy engine: each copy happens at a random moment after its issue.

#include <fmt/format.h>

#include <cstring>

#include "simt/bulk_stores.h"
#include "simt/device_memory.h"
#include "simt/places.h"
#include "simt/tensor_box.h"

namespace hybridcp::simt {

std::string StoreGroup::describe(uint32_t) const {
    return fmt::format("{} stores not read, {} not written", unread, unwritten);
}

namespace {

constexpr uint32_t kBulkAlignment = 16;
constexpr uint32_t kTensorAlignment = 128;
constexpr uint32_t kMbarrierBytes = 8;

using Bytes = std::vector<std::byte>;

// Where a load arrives: memory and the mbarrier beside it.
struct Arrival {
    Place to;
    Mbarrier* barrier;
    uint32_t issuer, time;
};

Arrival begin_arrival(const Place& to, uint32_t bytes, const Place& barrier, const Origin& origin) {
    if (to.block != barrier.block) {
        fault(origin, "has its mbarrier in another block than its destination");
    }
    Mbarrier& found = find_mbarrier(barrier, origin);
    found.check_visible(origin);
    to.block->memory.begin_write_async(to.offset, bytes, origin);
    return {to, &found, origin.thread->clock.id, origin.thread->clock.time};
}

void arrive(const Arrival& arrival, const void* data, uint32_t bytes) {
    arrival.to.block->memory.write_async(arrival.to.offset, data, bytes);
    arrival.barrier->complete(bytes, arrival.issuer, arrival.time);
}

void check_bulk(const void* global, uint32_t bytes, const Origin& origin) {
    if (bytes == 0 || bytes % kBulkAlignment != 0 ||
        reinterpret_cast<std::uintptr_t>(global) % kBulkAlignment != 0) {
        fault(origin,
              fmt::format("is misaligned: {} bytes at {}, not multiples of 16", bytes, global));
    }
}

std::shared_ptr<StoreGroup> open_group(Thread& thread) {
    if (thread.stores.empty()) {
        thread.stores.push_back(std::make_shared<StoreGroup>());
    }
    return thread.stores.back();
}

// Reads shared memory at one random moment and hands the bytes to `write` at a later one.
void start_store(const Place& from,
                 uint32_t bytes,
                 const Origin& origin,
                 std::function<void(const Bytes&)> write) {
    Engine& engine = Engine::current();
    const auto group = open_group(engine.thread());
    ++group->unread;
    ++group->unwritten;
    from.block->memory.begin_read_async(from.offset, bytes, origin);
    const Access access = access_now(origin);
    engine.start([=, &engine, write = std::move(write)] {
        Bytes data(bytes);
        from.block->memory.read_async(from.offset, data.data(), bytes, origin);
        from.block->memory.end_read_async(from.offset, bytes, access);
        --group->unread;
        engine.notify(*group);
        engine.start([=, &engine, data = std::move(data)] {
            write(data);
            --group->unwritten;
            engine.notify(*group);
        });
    });
}

void check_box(const TensorMap& map, const Origin& origin) {
    if (map.data == nullptr || (map.swizzle_128 && map.box[0] * map.element_bytes != 128)) {
        fault(origin, "needs a tensor map; with the 128-byte swizzle its box is 128 bytes wide");
    }
    const uint64_t last = (map.extent[2] - 1) * map.stride_bytes[1] +
                          (map.extent[1] - 1) * map.stride_bytes[0] +
                          uint64_t{map.extent[0]} * map.element_bytes;
    check_global(map.data, last, false, origin);
}

}  // namespace
}  // namespace hybridcp::simt

namespace hybridcp::device {

using simt::at;
using simt::Engine;

void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, const Site& site) {
    const auto& origin = at("bulk_load", site);
    simt::check_bulk(from, bytes, origin);
    simt::check_global(from, bytes, false, origin);
    const auto arrival = simt::begin_arrival(
        simt::cluster_place(to, bytes, simt::kBulkAlignment), bytes,
        simt::cluster_place(barrier, simt::kMbarrierBytes, simt::kMbarrierBytes), origin);
    Engine::current().start([=] { simt::arrive(arrival, from, bytes); });
}

void bulk_copy_cluster(
    uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier, const Site& site) {
    const simt::Origin origin = at("bulk_copy_cluster", site);
    simt::check_bulk(nullptr, bytes, origin);
    const simt::Place source = simt::own_place(from, bytes, simt::kBulkAlignment);
    const auto arrival = simt::begin_arrival(
        simt::cluster_place(to, bytes, simt::kBulkAlignment), bytes,
        simt::cluster_place(barrier, simt::kMbarrierBytes, simt::kMbarrierBytes), origin);
    source.block->memory.begin_read_async(source.offset, bytes, origin);
    const simt::Access access = access_now(origin);
    Engine::current().start([=] {
        simt::Bytes data(bytes);
        source.block->memory.read_async(source.offset, data.data(), bytes, origin);
        source.block->memory.end_read_async(source.offset, bytes, access);
        simt::arrive(arrival, data.data(), bytes);
    });
}

void store_cluster_async(uint32_t to, Float4 value, uint32_t barrier, const Site& site) {
    const auto& origin = at("store_cluster_async", site);
    const auto arrival = simt::begin_arrival(
        simt::cluster_place(to, sizeof(value), sizeof(value)), sizeof(value),
        simt::cluster_place(barrier, simt::kMbarrierBytes, simt::kMbarrierBytes), origin);
    Engine::current().start([=] { simt::arrive(arrival, &value, sizeof(value)); });
}

void bulk_store(void* to, uint32_t from, uint32_t bytes, const Site& site) {
    const auto& origin = at("bulk_store", site);
    simt::check_bulk(to, bytes, origin);
    simt::check_global(to, bytes, true, origin);
    const simt::Place source = simt::own_place(from, bytes, simt::kBulkAlignment);
    simt::start_store(source, bytes, origin,
                      [=](const simt::Bytes& data) { std::memcpy(to, data.data(), data.size()); });
}

void tensor_load(uint32_t to,
                 const TensorMap* map,
                 uint32_t barrier,
                 TensorPosition position,
                 const Site& site) {
    const auto& origin = at("tensor_load", site);
    simt::check_box(*map, origin);
    const uint32_t bytes = simt::box_bytes(*map);
    const auto arrival = simt::begin_arrival(
        simt::cluster_place(to, bytes, simt::kTensorAlignment), bytes,
        simt::cluster_place(barrier, simt::kMbarrierBytes, simt::kMbarrierBytes), origin);
    Engine::current().start([=, copy = *map] {
        simt::arrive(arrival, simt::read_box(copy, position, arrival.to.offset).data(), bytes);
    });
}

// The sixth parameter is the place of the call.
// NOLINTNEXTLINE(readability-function-size)
void tensor_load_multicast(uint32_t to,
                           const TensorMap* map,
                           uint32_t barrier,
                           TensorPosition position,
                           uint16_t blocks,
                           const Site& site) {
    const simt::Origin origin = at("tensor_load_multicast", site);
    Engine& engine = Engine::current();
    simt::check_box(*map, origin);
    const uint32_t bytes = simt::box_bytes(*map);
    const uint32_t to_offset = simt::own_place(to, bytes, simt::kTensorAlignment).offset;
    const uint32_t barrier_offset =
        simt::own_place(barrier, simt::kMbarrierBytes, simt::kMbarrierBytes).offset;
    for (uint32_t rank = 0; rank < 16; ++rank) {
        if ((blocks >> rank & 1) == 0) {
            continue;
        }
        simt::Block& block = engine.block_of_rank(rank, origin);
        const auto arrival =
            simt::begin_arrival({&block, to_offset}, bytes, {&block, barrier_offset}, origin);
        engine.start([=, copy = *map] {
            simt::arrive(arrival, simt::read_box(copy, position, to_offset).data(), bytes);
        });
    }
}

void tensor_store(
    const TensorMap* map, uint32_t from, TensorPosition position, uint32_t said, const Site& site) {
    const auto& origin = at("tensor_store", site);
    simt::check_box(*map, origin);
    const uint32_t bytes = simt::box_bytes(*map);
    if (said != bytes) {
        simt::fault(origin, fmt::format("is said to store {} bytes; its box has {}", said, bytes));
    }
    const simt::Place source = simt::own_place(from, bytes, simt::kTensorAlignment);
    simt::start_store(source, bytes, origin, [=, copy = *map](const simt::Bytes& data) {
        simt::write_box(copy, position, source.offset, data);
    });
}

void bulk_commit(const Site& site) {
    at("bulk_commit", site);
    simt::Thread& thread = Engine::current().thread();
    (void)simt::open_group(thread);
    thread.stores.push_back(std::make_shared<simt::StoreGroup>());
}

void wait_for_stores(uint32_t pending, bool reads_only, const Site& site) {
    at(reads_only ? "bulk_wait_read" : "bulk_wait", site);
    const auto& stores = Engine::current().thread().stores;
    const std::size_t committed = stores.empty() ? 0 : stores.size() - 1;
    for (std::size_t i = 0; i + pending < committed; ++i) {
        while ((reads_only ? stores[i]->unread : stores[i]->unwritten) > 0) {
            Engine::current().wait(*stores[i]);
        }
    }
}

}  // namespace hybridcp::device
