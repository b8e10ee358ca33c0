#pragma once

// Shared memory of a block with what is known of each 2-byte cell: whether it was written, by whom,
// and whether asynchronous work is about to write or read it.

#include <array>
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <vector>

namespace hybridcp::simt {

struct Thread;

/// Who does something, for messages.
struct Origin {
    Thread* thread = nullptr;
    const char* operation = "";
    std::source_location site = {};
};

/// A thread at one of its times.
struct Access {
    Thread* thread = nullptr;
    uint32_t time = 0;
};
[[nodiscard]] Access access_now(const Origin& origin);

class SharedMemory {
  public:
    explicit SharedMemory(uint32_t bytes);
    [[nodiscard]] uint32_t bytes() const { return static_cast<uint32_t>(data_.size()); }

    // Offsets and lengths are even. Each reports a misuse by throwing Fault.
    void read(uint32_t offset, void* to, uint32_t bytes, const Origin& origin);
    void write(uint32_t offset, const void* from, uint32_t bytes, const Origin& origin);
    /// By wgmma and the copy engine, between the calls below.
    void read_async(uint32_t offset, void* to, uint32_t bytes, const Origin& origin) const;
    void write_async(uint32_t offset, const void* from, uint32_t bytes);
    /// Between these two calls of a copy nobody may touch its destination; write_async ends it.
    void begin_write_async(uint32_t offset, uint32_t bytes, const Origin& origin);
    /// Between these two calls nobody may write the cells. Their writers must have fenced, and
    /// handed over since.
    void begin_read_async(uint32_t offset, uint32_t bytes, const Origin& origin);
    void end_read_async(uint32_t offset, uint32_t bytes, const Access& reader);
    /// An mbarrier lives here from now on.
    void place_mbarrier(uint32_t offset, const Origin& origin);

  private:
    struct Cell {
        Access writer;
        uint32_t writer_fences = 0;     // the writer's proxy fences before that store
        std::array<Access, 3> readers;  // since; if there are more, some are forgotten
        uint16_t async_readers = 0;
        bool by_copy = false;
        bool written = false;
        bool in_flight = false;
        bool mbarrier = false;
    };
    void check_write(uint32_t offset, uint32_t bytes, const Origin& origin) const;
    void check_read(uint32_t offset, const Cell& cell, const Origin& origin) const;
    static void note_reader(Cell& cell, const Access& reader);

    std::vector<std::byte> data_;
    std::vector<Cell> cells_;
};

}  // namespace hybridcp::simt
