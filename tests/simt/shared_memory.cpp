#include "simt/shared_memory.h"

#include <cstring>

#include "simt/engine.h"

namespace hybridcp::simt {
namespace {

constexpr uint32_t kCellBytes = 2;
// A NaN as fp32, bf16 and fp16, so that what escapes the checks shows in the results.
constexpr auto kPoison = std::byte{0xff};

bool is_known(const Origin& origin, const Access& access) {
    return access.thread == nullptr ||
           origin.thread->clock.knows(access.thread->clock.id, access.time);
}

}  // namespace

Access access_now(const Origin& origin) {
    return {origin.thread, origin.thread->clock.time};
}

SharedMemory::SharedMemory(uint32_t bytes) : data_(bytes, kPoison), cells_(bytes / kCellBytes) {}

void SharedMemory::check_read(uint32_t offset, const Cell& cell, const Origin& origin) const {
    const std::string place = "reads shared memory at " + shared_text(offset);
    if (cell.mbarrier) {
        fault(origin, place + ", where an mbarrier lies");
    }
    if (cell.in_flight) {
        fault(origin, place + " that a copy in flight is writing");
    }
    if (!cell.written) {
        fault(origin, place + " that nobody has written");
    }
    fault(origin, place + " that " + thread_text(*cell.writer.thread) + " wrote" +
                      (cell.by_copy ? " by a copy" : "") + " with no barrier between");
}

void SharedMemory::note_reader(Cell& cell, const Access& reader) {
    const Clock& clock = reader.thread->clock;
    Access* place = &cell.readers[reader.time % cell.readers.size()];
    for (Access& known : cell.readers) {
        if (known.thread == nullptr || clock.knows(known.thread->clock.id, known.time)) {
            place = &known;
            break;
        }
    }
    *place = reader;
}

void SharedMemory::read(uint32_t offset, void* to, uint32_t bytes, const Origin& origin) {
    origin.thread->clock.touched = true;
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        Cell& cell = cells_[(offset + i) / kCellBytes];
        if (!cell.written || cell.in_flight || cell.mbarrier || !is_known(origin, cell.writer)) {
            check_read(offset + i, cell, origin);
        }
        note_reader(cell, access_now(origin));
    }
    std::memcpy(to, &data_[offset], bytes);
}

void SharedMemory::read_async(uint32_t offset,
                              void* to,
                              uint32_t bytes,
                              const Origin& origin) const {
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        const Cell& cell = cells_[(offset + i) / kCellBytes];
        if (!cell.written || cell.in_flight || cell.mbarrier) {
            check_read(offset + i, cell, origin);
        }
    }
    std::memcpy(to, &data_[offset], bytes);
}

void SharedMemory::check_write(uint32_t offset, uint32_t bytes, const Origin& origin) const {
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        const Cell& cell = cells_[(offset + i) / kCellBytes];
        const auto complain = [&](const std::string& what) {
            fault(origin, "writes shared memory at " + shared_text(offset + i) + what);
        };
        if (cell.mbarrier) {
            complain(", where an mbarrier lies");
        }
        if (cell.in_flight) {
            complain(" that a copy in flight is writing");
        }
        if (cell.async_readers != 0) {
            complain(" that asynchronous work, not yet waited for, is reading");
        }
        if (!is_known(origin, cell.writer)) {
            complain(" that " + thread_text(*cell.writer.thread) +
                     " wrote with no barrier between");
        }
        for (const Access& reader : cell.readers) {
            if (!is_known(origin, reader)) {
                complain(" that " + thread_text(*reader.thread) + " read with no barrier between");
            }
        }
    }
}

void SharedMemory::write(uint32_t offset, const void* from, uint32_t bytes, const Origin& origin) {
    check_write(offset, bytes, origin);
    origin.thread->clock.touched = true;
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        Cell& cell = cells_[(offset + i) / kCellBytes];
        cell.written = true;
        cell.writer = access_now(origin);
        cell.writer_fences = static_cast<uint32_t>(origin.thread->proxy_fences.size());
        cell.readers = {};
        cell.by_copy = false;
    }
    std::memcpy(&data_[offset], from, bytes);
}

void SharedMemory::begin_write_async(uint32_t offset, uint32_t bytes, const Origin& origin) {
    check_write(offset, bytes, origin);
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        Cell& cell = cells_[(offset + i) / kCellBytes];
        cell.in_flight = true;
        cell.by_copy = true;
        cell.writer = access_now(origin);
        cell.readers = {};
    }
    std::memset(&data_[offset], static_cast<int>(kPoison), bytes);
}

void SharedMemory::write_async(uint32_t offset, const void* from, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        Cell& cell = cells_[(offset + i) / kCellBytes];
        cell.in_flight = false;
        cell.written = true;
    }
    std::memcpy(&data_[offset], from, bytes);
}

void SharedMemory::begin_read_async(uint32_t offset, uint32_t bytes, const Origin& origin) {
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        Cell& cell = cells_[(offset + i) / kCellBytes];
        if (!cell.written || cell.in_flight || cell.mbarrier || !is_known(origin, cell.writer)) {
            check_read(offset + i, cell, origin);
        }
        if (!cell.by_copy) {
            const Thread& writer = *cell.writer.thread;
            const auto& fences = writer.proxy_fences;
            if (cell.writer_fences == fences.size() ||
                !origin.thread->clock.knows(writer.clock.id, fences[cell.writer_fences])) {
                fault(origin, "reads shared memory at " + shared_text(offset + i) + " that " +
                                  thread_text(writer) +
                                  " stored without fence_proxy_async before the barrier between");
            }
        }
        ++cell.async_readers;
    }
}

void SharedMemory::end_read_async(uint32_t offset, uint32_t bytes, const Access& reader) {
    reader.thread->clock.touched = true;
    for (uint32_t i = 0; i < bytes; i += kCellBytes) {
        Cell& cell = cells_[(offset + i) / kCellBytes];
        --cell.async_readers;
        note_reader(cell, reader);
    }
}

void SharedMemory::place_mbarrier(uint32_t offset, const Origin& origin) {
    static constexpr uint32_t kMbarrierBytes = 8;
    check_write(offset, kMbarrierBytes, origin);
    for (uint32_t i = 0; i < kMbarrierBytes; i += kCellBytes) {
        cells_[(offset + i) / kCellBytes].mbarrier = true;
    }
}

}  // namespace hybridcp::simt
