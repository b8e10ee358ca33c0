#pragma once

// What threads wait for.

#include <array>
#include <cstdint>
#include <string>

#include "simt/order.h"
#include "simt/shared_memory.h"

namespace hybridcp::simt {

struct Warp;

class Waitable {
  public:
    Waitable() = default;
    virtual ~Waitable() = default;
    Waitable(const Waitable&) = delete;
    Waitable& operator=(const Waitable&) = delete;
    /// State for the message that a kernel makes no progress; `parity` is what the thread waits
    /// for.
    [[nodiscard]] virtual std::string describe(uint32_t parity) const = 0;
};

/// The meeting of the 32 lanes of a warp in one primitive.
class Collective : public Waitable {
  public:
    void start(std::size_t threads) { channel_.resize(threads); }
    [[nodiscard]] std::string describe(uint32_t parity) const override;
    /// The running thread joins with its operands; true for the last lane, which acts for all and
    /// then releases.
    [[nodiscard]] bool join(void* operands);
    void release();
    [[nodiscard]] const std::array<void*, 32>& operands() const { return operands_; }

  private:
    void order_lanes(const Warp& warp);

    uint32_t arrived_ = 0;
    const char* operation_ = "";
    uint32_t first_lane_ = 0;
    std::array<void*, 32> operands_{};
    Channel channel_;
};

/// bar.sync and bar.arrive; counted in threads, by warps.
class NamedBarrier : public Waitable {
  public:
    void start(std::size_t threads) { channel_.resize(threads); }
    [[nodiscard]] std::string describe(uint32_t parity) const override;
    void arrive(uint32_t id, uint32_t threads, const Warp& warp);
    void leave(Clock& clock) { channel_.acquire(clock); }
    [[nodiscard]] uint64_t generation() const { return generation_; }

  private:
    uint32_t id_ = 0;
    uint32_t expected_ = 0;
    uint32_t arrived_ = 0;
    uint32_t warps_ = 0;  // that arrived, as bits
    uint64_t generation_ = 0;
    Channel channel_;
};

class ClusterBarrier : public Waitable {
  public:
    [[nodiscard]] std::string describe(uint32_t parity) const override;
    void arrive(uint32_t live_threads);
    /// A thread exits: the others no longer wait for it.
    void leave(const Thread& thread, uint32_t live_threads);
    [[nodiscard]] int64_t generation() const { return generation_; }
    void acquire(Clock& clock) { channel_.acquire(clock); }
    void start(std::size_t threads) {
        arrived_ = 0;
        channel_ = Channel(threads);
    }

  private:
    void check_complete(uint32_t live_threads);

    uint32_t arrived_ = 0;
    int64_t generation_ = 0;
    Channel channel_;
};

class Mbarrier : public Waitable {
  public:
    Mbarrier(uint32_t offset, uint32_t arrivals, const Thread& owner);
    [[nodiscard]] std::string describe(uint32_t parity) const override;
    /// By that thread, whose clock hands over.
    void arrive(const Origin& origin);
    void expect(uint32_t bytes, const Origin& origin);
    /// Bytes of a copy that its thread issued at that time.
    void complete(uint32_t bytes, uint32_t issuer, uint32_t time);
    void acquire(Clock& clock) { channel_.acquire(clock); }
    [[nodiscard]] bool ended(uint32_t parity) const { return (phase_ & 1) != (parity & 1); }
    /// Reports that its initialiser has not made it visible to other blocks and the copy engine.
    void check_visible(const Origin& origin) const;

  private:
    void end_phase_if_complete();

    uint32_t offset_;
    uint32_t arrivals_;
    uint32_t pending_;
    int64_t pending_bytes_ = 0;
    uint64_t phase_ = 0;
    const Thread* owner_;
    uint32_t owner_fences_;
    Channel channel_;
};

}  // namespace hybridcp::simt
