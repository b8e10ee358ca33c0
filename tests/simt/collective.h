#pragma once

#include <array>
#include <cstdint>

#include "simt/engine.h"

namespace hybridcp::simt {

/// The running thread meets the 31 others of its warp in the primitive that at() has named;
/// `finish` then runs once with pointers to the operands of all lanes, in which it leaves the
/// results.
template <class Operands, class Finish>
void warp_collective(Operands& operands, Finish finish) {
    Collective& meeting = Engine::current().thread().warp->collective;
    if (!meeting.join(&operands)) {
        return;
    }
    std::array<Operands*, kWarpThreads> lanes{};
    for (uint32_t lane = 0; lane < kWarpThreads; ++lane) {
        lanes[lane] = static_cast<Operands*>(meeting.operands()[lane]);
    }
    finish(lanes);
    meeting.release();
}

}  // namespace hybridcp::simt
