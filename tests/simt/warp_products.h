#pragma once

// The products of wgmma that a warp has in flight. Warp w of a warpgroup computes rows 16 w to 16 w
// + 15, which depend on its own registers and on shared memory alone, so the warps of a warpgroup
// run ahead of each other freely; that they issue the same products is checked.

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "simt/shared_memory.h"

namespace hybridcp::simt {

struct Warp;

/// An operand in shared memory: what a descriptor says.
struct OperandTile {
    uint32_t start = 0, leading = 0, stride = 0;
    bool k_major = true;
    bool f16 = false;  // else bf16
};

/// The sums of one set of registers while products run on them.
struct Sums {
    uint32_t columns = 0;
    std::vector<float> values;           // 16 x columns
    std::array<float*, 32> registers{};  // of each lane
    uint32_t unfinished = 0;             // products
};

struct Product {
    bool a_in_registers = false;
    std::vector<float> a;  // 16 x 16, if in registers
    OperandTile a_tile, b_tile;
    bool add = false;
    std::shared_ptr<Sums> sums;
    Origin origin;
    uint64_t group = 0;
    bool done = false;
};

class WarpProducts {
  public:
    void fence() { fenced_ = true; }
    void commit() { ++open_group_; }
    void issue(Warp& warp, Product product);
    /// Sums for these registers: those in flight, or new ones, whose registers then hold NaN.
    [[nodiscard]] std::shared_ptr<Sums> sums_for(const std::array<float*, 32>& registers,
                                                 uint32_t columns);
    /// Runs the oldest product that has not run; false if there is none.
    bool run_one(Warp& warp);
    [[nodiscard]] bool has_work() const { return next_ < queue_.size(); }
    /// How many products this warp issued before; counts this one.
    [[nodiscard]] std::size_t next_in_log() { return issued_++; }
    [[nodiscard]] std::size_t issued() const { return issued_; }
    [[nodiscard]] bool idle() const { return queue_.empty(); }
    /// Finishes groups until at most `pending` committed ones are left.
    void wait(Warp& warp, uint32_t pending);

  private:
    std::deque<Product> queue_;  // issued, not waited for
    std::size_t issued_ = 0;
    std::size_t next_ = 0;  // of queue_, the first that has not run
    uint64_t open_group_ = 0;
    bool fenced_ = false;
};

}  // namespace hybridcp::simt
