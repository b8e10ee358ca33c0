#pragma once

// What the addresses of a primitive name, checked.

#include <cstddef>
#include <cstdint>
#include <source_location>

#include "simt/engine.h"

namespace hybridcp::simt {

/// Notes what the running thread does and where, for messages.
const Origin& at(const char* operation, const std::source_location& site);

/// A place in shared memory that an address names.
struct Place {
    Block* block;
    uint32_t offset;
};
/// Of the running thread's own block; reports addresses outside and misaligned ones.
[[nodiscard]] Place own_place(uint32_t address, uint32_t bytes, uint32_t alignment);
/// Of any block of the cluster.
[[nodiscard]] Place cluster_place(uint32_t address, uint32_t bytes, uint32_t alignment);
/// The same for the address of an mbarrier.
[[nodiscard]] Mbarrier& find_mbarrier(const Place& place, const Origin& origin);
/// Reports an access outside the buffers of the launch, if it names any.
void check_global(const void* address, std::size_t bytes, bool write, const Origin& origin);

}  // namespace hybridcp::simt
