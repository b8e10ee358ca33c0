// Parameters, gradients and moments as a rank holds them through a step: whole, or sharded with
// units gathered around their passes (train/sharded_parameters.h).
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "plan/block_memory.h"

namespace hybridcp::plan {

class State {
  public:
    /// Takes what is there before and after every step; the ledger must outlive it. Errors:
    /// CheckError for a parameter of a unit that the model does not have.
    State(MemoryLedger& ledger, const MemoryPlanInput& in);

    [[nodiscard]] std::int64_t last_unit() const {
        return static_cast<std::int64_t>(units_.size()) - 1;
    }
    /// Elements of the largest parameter, or of the largest run of one here.
    [[nodiscard]] std::int64_t largest() const { return largest_; }

    // Of sharded parameters; nothing happens where they are whole.
    /// Gathers a unit and, with prefetch, the next; -1 for none.
    void fetch(std::int64_t unit, std::int64_t next);
    void release(std::int64_t unit);
    void release_all() { gathered_.clear(); }
    /// The unit's whole gradients go into rows that are exchanged; the sum of the unit before ends.
    void reduce(std::int64_t unit, std::vector<Held>& gradients);
    void finish_reductions();

    /// The row into which whole gradients are laid for their sum over the ranks.
    void reduce_buckets();

  private:
    struct Unit {
        std::int64_t narrow = 0, wide = 0;  // elements
    };
    [[nodiscard]] std::int64_t part(std::int64_t numel) const {
        return (numel + in_.shard_size - 1) / in_.shard_size;
    }
    [[nodiscard]] std::vector<std::int64_t> parts_of(std::int64_t unit) const;
    void gather(std::int64_t unit);

    MemoryLedger& ledger_;
    const MemoryPlanInput& in_;
    std::vector<Unit> units_;
    std::int64_t numel_ = 0;
    std::int64_t largest_ = 0;
    std::vector<Held> held_;
    std::map<std::int64_t, Held> gathered_;
    std::vector<Held> reducing_;
    std::int64_t row_ = 0;
};

}  // namespace hybridcp::plan
