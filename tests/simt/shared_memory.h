#pragma once

// Shared memory of a block with what is known of each 2-byte cell: whether it was written, by whom,
// and whether asynchronous work is about to write or read it.

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <vector>

namespace hybridcp::simt {

struct Thread;

/// Who does something, for messages.
struct Origin {
    const Thread* thread = nullptr;
    const char* operation = "";
    std::source_location site = {};
};

class SharedMemory {
  public:
    explicit SharedMemory(uint32_t bytes);
    [[nodiscard]] uint32_t bytes() const { return static_cast<uint32_t>(data_.size()); }

    // Offsets and lengths are even. Each reports a misuse by throwing Fault.
    void read(uint32_t offset, void* to, uint32_t bytes, const Origin& origin) const;
    void write(uint32_t offset, const void* from, uint32_t bytes, const Origin& origin);
    /// By wgmma and the copy engine: the writer of each cell must have fenced since.
    void read_async(uint32_t offset, void* to, uint32_t bytes, const Origin& origin) const;
    void write_async(uint32_t offset, const void* from, uint32_t bytes);
    /// Between these two calls of a copy nobody may touch its destination; write_async ends it.
    void begin_write_async(uint32_t offset, uint32_t bytes, const Origin& origin);
    /// Between these two calls nobody may write the cells.
    void begin_read_async(uint32_t offset, uint32_t bytes);
    void end_read_async(uint32_t offset, uint32_t bytes);
    /// An mbarrier lives here from now on.
    void place_mbarrier(uint32_t offset, const Origin& origin);

  private:
    struct Cell {
        const Thread* writer = nullptr;  // by a generic store; null after the copy engine
        uint32_t writer_fences = 0;      // the writer's proxy fences before that store
        uint16_t readers = 0;
        bool written = false;
        bool in_flight = false;
        bool mbarrier = false;
    };
    void check_write(uint32_t offset, uint32_t bytes, const Origin& origin) const;
    void check_read(uint32_t offset, const Cell& cell, const Origin& origin) const;

    std::vector<std::byte> data_;
    std::vector<Cell> cells_;
};

}  // namespace hybridcp::simt
