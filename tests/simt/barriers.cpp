#include "simt/barriers.h"

#include <fmt/format.h>

#include <cstring>

#include "simt/engine.h"

namespace hybridcp::simt {

std::string Collective::describe(uint32_t) const {
    return fmt::format("with {} of 32 lanes there", __builtin_popcount(arrived_));
}

bool Collective::join(void* operands) {
    Engine& engine = Engine::current();
    const Thread& self = engine.thread();
    const uint32_t lane = self.index % kWarpThreads;
    if (arrived_ == 0) {
        operation_ = self.origin.operation;
        first_lane_ = lane;
    } else if (std::strcmp(operation_, self.origin.operation) != 0) {
        fault(self.origin, "diverges: lane " + std::to_string(first_lane_) + " of the warp is in " +
                               site_text(self.warp->lanes[first_lane_]->origin));
    }
    for (const Thread* other : self.warp->lanes) {
        if (other->exited) {
            fault(self.origin, "needs the whole warp, but lane " +
                                   std::to_string(other->index % kWarpThreads) + " has exited");
        }
    }
    arrived_ |= 1U << lane;
    operands_[lane] = operands;
    if (arrived_ == 0xffffffffU) {
        order_lanes(*self.warp);
        return true;
    }
    engine.wait(*this);
    return false;
}

// A warp executes a collective as one instruction: it orders what its lanes did before, and what it
// did itself.
void Collective::order_lanes(const Warp& warp) {
    bool changed = false;
    for (const Thread* lane : warp.lanes) {
        changed =
            changed || lane->clock.touched || lane->clock.others != warp.lanes[0]->clock.others;
    }
    if (!changed) {
        return;
    }
    for (Thread* lane : warp.lanes) {
        channel_.release(lane->clock);
    }
    channel_.publish();
    for (Thread* lane : warp.lanes) {
        channel_.acquire(lane->clock);
    }
}

void Collective::release() {
    Warp& warp = *Engine::current().thread().warp;
    order_lanes(warp);
    arrived_ = 0;
    warp.runnable = 0xffffffffU;
}

std::string NamedBarrier::describe(uint32_t) const {
    return fmt::format("barrier {}, {} of {} threads there", id_, arrived_, expected_);
}

void NamedBarrier::arrive(uint32_t id, uint32_t threads, const Warp& warp) {
    const Origin& origin = Engine::current().thread().origin;
    id_ = id;
    if (threads == 0 || threads % kWarpThreads != 0) {
        fault(origin, fmt::format("counts {} threads, not a multiple of 32", threads));
    }
    if (expected_ == 0) {
        expected_ = threads;
    } else if (expected_ != threads) {
        fault(origin, fmt::format("counts {} threads at barrier {}, where other warps count {}",
                                  threads, id, expected_));
    }
    if ((warps_ >> warp.index & 1) != 0) {
        fault(origin, fmt::format("arrives twice in one round of barrier {}", id));
    }
    warps_ |= 1U << warp.index;
    arrived_ += kWarpThreads;
    for (Thread* lane : warp.lanes) {
        channel_.release(lane->clock);
    }
    if (arrived_ == expected_) {
        ++generation_;
        expected_ = arrived_ = warps_ = 0;
        channel_.publish();
        Engine::current().notify(*this);
    }
}

std::string ClusterBarrier::describe(uint32_t) const {
    return fmt::format("cluster barrier, {} threads there", arrived_);
}

void ClusterBarrier::arrive(uint32_t live_threads) {
    Thread& self = Engine::current().thread();
    if (self.cluster_generation >= 0) {
        fault(self.origin, "arrives twice without cluster_wait between");
    }
    self.cluster_generation = generation_;
    channel_.release(self.clock);
    ++arrived_;
    check_complete(live_threads);
}

void ClusterBarrier::leave(const Thread& thread, uint32_t live_threads) {
    if (thread.cluster_generation == generation_) {
        --arrived_;
    }
    check_complete(live_threads);
}

void ClusterBarrier::check_complete(uint32_t live_threads) {
    if (arrived_ > 0 && arrived_ >= live_threads) {
        arrived_ = 0;
        ++generation_;
        channel_.publish();
        Engine::current().notify(*this);
    }
}

Mbarrier::Mbarrier(uint32_t offset, uint32_t arrivals, const Thread& owner)
    : offset_(offset),
      arrivals_(arrivals),
      pending_(arrivals),
      owner_(&owner),
      owner_fences_(owner.init_fences),
      channel_(Engine::current().threads()) {}

std::string Mbarrier::describe(uint32_t parity) const {
    return fmt::format(
        "mbarrier {}, waits for the end of parity {}; it is in phase {}, which lacks {} of {} "
        "arrivals and {} bytes",
        shared_text(offset_), parity, phase_, pending_, arrivals_, pending_bytes_);
}

void Mbarrier::arrive(const Origin& origin) {
    if (pending_ == 0) {
        fault(origin, "arrives once too often: " + describe(0));
    }
    --pending_;
    channel_.release(Engine::current().thread().clock);
    end_phase_if_complete();
}

void Mbarrier::expect(uint32_t bytes, const Origin& origin) {
    static constexpr int64_t kMostBytes = (1 << 20) - 1;
    pending_bytes_ += bytes;
    if (pending_bytes_ > kMostBytes) {
        fault(origin, "expects more than 2^20 - 1 bytes");
    }
    end_phase_if_complete();
}

void Mbarrier::complete(uint32_t bytes, uint32_t issuer, uint32_t time) {
    channel_.release(issuer, time);
    pending_bytes_ -= bytes;
    end_phase_if_complete();
}

void Mbarrier::end_phase_if_complete() {
    if (pending_ == 0 && pending_bytes_ == 0) {
        ++phase_;
        pending_ = arrivals_;
        channel_.publish();
        Engine::current().notify(*this);
    }
}

void Mbarrier::check_visible(const Origin& origin) const {
    if (owner_->init_fences == owner_fences_) {
        fault(origin, "uses the mbarrier " + shared_text(offset_) +
                          " whose initialiser has not called fence_mbarrier_init since");
    }
}

}  // namespace hybridcp::simt
