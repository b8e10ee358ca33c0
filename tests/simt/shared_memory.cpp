#include "simt/shared_memory.h"

#include <cstring>

#include "simt/engine.h"

namespace hybridcp::simt {
namespace {

constexpr uint32_t kCellBytes = 2;
// A NaN as fp32, bf16 and fp16, so that what escapes the checks shows in the results.
constexpr auto kPoison = std::byte{0xff};

}  // namespace

SharedMemory::SharedMemory(uint32_t bytes) : data_(bytes, kPoison), cells_(bytes / kCellBytes) {}

void SharedMemory::check_read(uint32_t offset, const Cell& cell, const Origin& origin) const {
    if (cell.mbarrier) {
        fault(origin, "reads the mbarrier at " + shared_text(offset) + " as data");
    }
    if (cell.in_flight) {
        fault(origin, "reads shared memory at " + shared_text(offset) +
                          " that a copy in flight is writing");
    }
    if (!cell.written) {
        fault(origin, "reads shared memory at " + shared_text(offset) + " that nobody has written");
    }
}

void SharedMemory::read(uint32_t offset, void* to, uint32_t bytes, const Origin& origin) const {
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        const Cell& cell = cells_[(offset + i) / kCellBytes];
        if (!cell.written || cell.in_flight || cell.mbarrier) {
            check_read(offset + i, cell, origin);
        }
    }
    std::memcpy(to, &data_[offset], bytes);
}

void SharedMemory::read_async(uint32_t offset,
                              void* to,
                              uint32_t bytes,
                              const Origin& origin) const {
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        const Cell& cell = cells_[(offset + i) / kCellBytes];
        check_read(offset + i, cell, origin);
        if (cell.writer != nullptr && cell.writer->proxy_fences == cell.writer_fences) {
            fault(origin, "reads shared memory at " + shared_text(offset + i) + " that " +
                              thread_text(*cell.writer) +
                              " stored without fence_proxy_async since");
        }
    }
    std::memcpy(to, &data_[offset], bytes);
}

void SharedMemory::check_write(uint32_t offset, uint32_t bytes, const Origin& origin) const {
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        const Cell& cell = cells_[(offset + i) / kCellBytes];
        if (cell.mbarrier) {
            fault(origin, "writes over the mbarrier at " + shared_text(offset + i));
        }
        if (cell.in_flight) {
            fault(origin, "writes shared memory at " + shared_text(offset + i) +
                              " that a copy in flight is writing");
        }
        if (cell.readers != 0) {
            fault(origin, "writes shared memory at " + shared_text(offset + i) +
                              " that asynchronous work, not yet waited for, is reading");
        }
    }
}

void SharedMemory::write(uint32_t offset, const void* from, uint32_t bytes, const Origin& origin) {
    check_write(offset, bytes, origin);
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        Cell& cell = cells_[(offset + i) / kCellBytes];
        cell.written = true;
        cell.writer = origin.thread;
        cell.writer_fences = origin.thread->proxy_fences;
    }
    std::memcpy(&data_[offset], from, bytes);
}

void SharedMemory::begin_write_async(uint32_t offset, uint32_t bytes, const Origin& origin) {
    check_write(offset, bytes, origin);
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        cells_[(offset + i) / kCellBytes].in_flight = true;
    }
    std::memset(&data_[offset], static_cast<int>(kPoison), bytes);
}

void SharedMemory::write_async(uint32_t offset, const void* from, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        Cell& cell = cells_[(offset + i) / kCellBytes];
        cell.in_flight = false;
        cell.written = true;
        cell.writer = nullptr;
    }
    std::memcpy(&data_[offset], from, bytes);
}

void SharedMemory::begin_read_async(uint32_t offset, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        ++cells_[(offset + i) / kCellBytes].readers;
    }
}

void SharedMemory::end_read_async(uint32_t offset, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        --cells_[(offset + i) / kCellBytes].readers;
    }
}

void SharedMemory::place_mbarrier(uint32_t offset, const Origin& origin) {
    constexpr uint32_t kMbarrierBytes = 8;
    check_write(offset, kMbarrierBytes, origin);
    for (uint32_t i = 0; i < kMbarrierBytes; i += kCellBytes) {
        cells_[(offset + i) / kCellBytes].mbarrier = true;
    }
}

}  // namespace hybridcp::simt
