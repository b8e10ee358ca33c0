#pragma once

#include <cstdint>

#include "simt/barriers.h"

namespace hybridcp::simt {

/// The bulk stores of one commit group of a thread.
struct StoreGroup : Waitable {
    [[nodiscard]] std::string describe(uint32_t parity) const override;
    uint32_t unread = 0;     // stores that still have to read shared memory
    uint32_t unwritten = 0;  // that still have to write global memory
};

}  // namespace hybridcp::simt
