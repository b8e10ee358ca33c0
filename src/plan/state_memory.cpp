#include "plan/state_memory.h"

#include <algorithm>
#include <utility>

#include "hybridcp/error.h"

namespace hybridcp::plan {

namespace {
constexpr std::int64_t kBucketBytes = std::int64_t{64} << 20;  // train/gradient_reduction.h
}  // namespace

State::State(MemoryLedger& ledger, const MemoryPlanInput& in) : ledger_(ledger), in_(in) {
    units_.resize(in.model.layers.size() + 2);
    for (const PlannedParameter& parameter : in.model.parameters) {
        HCP_CHECK(parameter.unit >= 0 && parameter.unit <= last_unit(),
                  "memory plan: a parameter of unit {} in a model of {} layers", parameter.unit,
                  in.model.layers.size());
        Unit& unit = units_[static_cast<std::size_t>(parameter.unit)];
        (parameter.is_narrow ? unit.narrow : unit.wide) += parameter.numel;
        numel_ += parameter.numel;
        largest_ = std::max(largest_, parameter.numel);
    }
    std::int64_t kept = numel_;
    if (in.sharded) {
        kept = 0;
        std::int64_t longest_part = 0;
        for (const Unit& unit : units_) {
            kept += part(unit.narrow) + part(unit.wide);
            longest_part = std::max({longest_part, part(unit.narrow), part(unit.wide)});
        }
        largest_ = std::min(largest_, longest_part);
        held_.push_back(ledger.take(MemoryClass::kGradients, kWide * kept));
    }
    held_.push_back(ledger.take(MemoryClass::kParameters, kWide * kept));
    held_.push_back(ledger.take(MemoryClass::kOptimizer, 2 * kWide * kept));
}

void State::fetch(std::int64_t unit, std::int64_t next) {
    if (!in_.sharded) {
        return;
    }
    gather(unit);
    if (in_.prefetch && next >= 0 && next <= last_unit()) {
        gather(next);
    }
}

void State::release(std::int64_t unit) {
    for (const std::int64_t each : parts_of(unit)) {
        gathered_.erase(each);
    }
}

void State::reduce(std::int64_t unit, std::vector<Held>& gradients) {
    if (!in_.sharded) {
        return;
    }
    finish_reductions();
    release(unit);
    const Unit& sizes = units_[static_cast<std::size_t>(unit)];
    const std::int64_t row = part(sizes.narrow) + part(sizes.wide);
    Held rows = ledger_.take(MemoryClass::kGradients, kWide * row * in_.shard_size);
    gradients.clear();
    if (in_.shard_size > 1) {
        reducing_.push_back(std::move(rows));
        reducing_.push_back(ledger_.take(MemoryClass::kGradients,
                                         kWide * row * (in_.on_cuda ? 1 : in_.shard_size)));
        row_ = std::max(row_, row);
    }
}

void State::finish_reductions() {
    if (!reducing_.empty() && !in_.on_cuda) {
        (void)ledger_.take(MemoryClass::kGradients, kWide * row_);
    }
    reducing_.clear();
    row_ = 0;
}

void State::reduce_buckets() {
    std::int64_t bucket = 0;
    std::int64_t longest = 0;
    for (const PlannedParameter& parameter : in_.model.parameters) {
        const std::int64_t bytes = kWide * parameter.numel;
        bucket = bucket > 0 && bucket + bytes > kBucketBytes ? bytes : bucket + bytes;
        longest = std::max(longest, bucket);
    }
    (void)ledger_.take(MemoryClass::kGradients, longest);
}

std::vector<std::int64_t> State::parts_of(std::int64_t unit) const {
    std::vector<std::int64_t> parts{unit};
    if (in_.model.tied && unit == last_unit()) {
        parts.push_back(0);  // the head's matrix
    }
    return parts;
}

void State::gather(std::int64_t unit) {
    for (const std::int64_t each : parts_of(unit)) {
        const Unit& sizes = units_[static_cast<std::size_t>(each)];
        Held& whole = gathered_[each];
        if (!whole) {
            const std::int64_t bytes = in_.shard_size * (part(sizes.narrow) * in_.element_bytes +
                                                         part(sizes.wide) * kWide);
            whole = ledger_.take(MemoryClass::kParameters, bytes);
            if (in_.shard_size > 1 && !in_.on_cuda) {
                (void)ledger_.take(MemoryClass::kParameters, bytes);  // Gloo's own
            }
        }
    }
}

}  // namespace hybridcp::plan
