// All summaries gathered once per direction, then folded locally: S <- M S + S over the segments
// before one's own, dS <- M^T dS + dS over those after it. M of heads that are independent of their
// start does not travel, and a fold starts at the last segment all of whose heads are.

#include <algorithm>

#include "ops/state_exchange.h"

namespace hybridcp {

namespace {

using Slots = std::vector<SummaryGather::Slot>;

class AllGatherExchanger : public StateExchanger {
  public:
    AllGatherExchanger(const CpContext& context, const StateShape& shape)
        : context_(context),
          prefix_(context.plan->prefix),
          suffix_(context.plan->suffix),
          shape_(shape) {}

    at::Tensor start_states(const SegmentMaps& maps) override {
        if (prefix_.slots_per_rank == 0) {  // no document lies on more than one rank
            return {};
        }
        independent_ = IndependentHeads(maps, context_, shape_.heads);
        gather_summaries(maps);
        at::Tensor S_start = zeros();
        for (std::size_t i = 0; i < prefix_.predecessors.size(); ++i) {
            const Slots& before = prefix_.predecessors[i];
            std::size_t first = before.size();
            while (first > 0 && (first == before.size() || !forgets(before[first]))) {
                --first;
            }
            at::Tensor state;
            for (std::size_t j = first; j < before.size(); ++j) {
                state = state.defined()
                            ? at::matmul(summary_at(before[j]).M, state) + summary_at(before[j]).S
                            : summary_at(before[j]).S;
            }
            if (state.defined()) {
                S_start[static_cast<std::int64_t>(i)].copy_(state);
            }
        }
        keep_maps_of_successors();
        return S_start;
    }

    at::Tensor end_gradients(const std::function<at::Tensor()>& summarize) override {
        if (suffix_.slots_per_rank == 0) {
            return {};
        }
        at::Tensor slots = at::zeros(shape_.of(suffix_.slots_per_rank), shape_.options);
        if (!suffix_.local_segments.empty()) {
            const at::Tensor dS = summarize();
            for (std::size_t slot = 0; slot < suffix_.local_segments.size(); ++slot) {
                slots[static_cast<std::int64_t>(slot)].copy_(dS[suffix_.local_segments[slot]]);
            }
        }
        const at::Tensor gathered = context_.group->all_gather("gdn_gradient_summary", slots);
        const auto dS_at = [&](const SummaryGather::Slot& slot) {
            return gathered[slot.rank][slot.slot];
        };
        at::Tensor dS_end = zeros();
        for (std::size_t i = 0; i < suffix_.successors.size(); ++i) {
            const Slots& after = suffix_.successors[i];
            // M of a later segment stands in the forward gather, which leaves out the last of each
            // chain: there the fold starts, or where a segment forgets its start.
            const Slots& with_M = prefix_.successors[i];
            std::size_t end = 0;
            while (end < after.size() && (end == 0 || !forgets(with_M[end - 1]))) {
                ++end;
            }
            at::Tensor state;
            for (std::size_t j = end; j-- > 0;) {
                state = state.defined()
                            ? at::matmul(summary_at(with_M[j]).M.transpose(-1, -2), state) +
                                  dS_at(after[j])
                            : dS_at(after[j]);
            }
            if (state.defined()) {
                dS_end[static_cast<std::int64_t>(i)].copy_(state);
            }
        }
        return dS_end;
    }

    void finish() override {}

  private:
    [[nodiscard]] at::Tensor zeros() const {
        return at::zeros(shape_.of(static_cast<std::int64_t>(prefix_.predecessors.size())),
                         shape_.options);
    }

    [[nodiscard]] bool forgets(const SummaryGather::Slot& slot) const {
        const IndependentHeads::Heads heads = independent_.of(slot);
        return !heads.empty() && num_open(heads, shape_.heads) == 0;
    }

    [[nodiscard]] const GdnSummary& summary_at(const SummaryGather::Slot& slot) const {
        return summaries_[static_cast<std::size_t>(slot.rank)][static_cast<std::size_t>(slot.slot)];
    }

    /// Slots of a rank, from the slots that its segments fill: S and the open M of each, one after
    /// another.
    [[nodiscard]] std::vector<std::int64_t> slot_sizes(int rank) const {
        const std::int64_t S_size = shape_.heads * shape_.key_dim * shape_.value_dim;
        std::vector<std::int64_t> sizes;
        for (std::int64_t slot = 0; slot < prefix_.slots_of_rank[static_cast<std::size_t>(rank)];
             ++slot) {
            const std::int64_t open = num_open(independent_.of({rank, slot}), shape_.heads);
            sizes.push_back(S_size + open * shape_.key_dim * shape_.key_dim);
        }
        return sizes;
    }

    void gather_summaries(const SegmentMaps& maps) {
        const int num_ranks = context_.plan->layout.num_ranks();
        std::int64_t longest = 0;  // elements that a rank sends: all send as many
        std::vector<std::vector<std::int64_t>> sizes;
        for (int rank = 0; rank < num_ranks; ++rank) {
            sizes.push_back(slot_sizes(rank));
            std::int64_t total = 0;
            for (const std::int64_t size : sizes.back()) {
                total += size;
            }
            longest = std::max(longest, total);
        }
        at::Tensor own = at::zeros({longest}, shape_.options);
        if (!prefix_.local_segments.empty()) {
            pack(maps.summarize(), own);
        }
        const at::Tensor all = context_.group->all_gather("gdn_summary", own);
        summaries_.assign(static_cast<std::size_t>(num_ranks), {});
        for (int rank = 0; rank < num_ranks; ++rank) {
            std::int64_t offset = 0;
            for (const std::int64_t size : sizes[static_cast<std::size_t>(rank)]) {
                auto& of_rank = summaries_[static_cast<std::size_t>(rank)];
                const auto slot = static_cast<std::int64_t>(of_rank.size());
                of_rank.push_back(
                    unpack(all[rank].narrow(0, offset, size), independent_.of({rank, slot})));
                offset += size;
            }
        }
    }

    /// Backward reads nothing else; copies, so that what was gathered is freed.
    void keep_maps_of_successors() {
        std::vector<std::vector<GdnSummary>> kept;
        for (const auto& of_rank : summaries_) {
            kept.emplace_back(of_rank.size());
        }
        for (const Slots& after : prefix_.successors) {
            for (const SummaryGather::Slot& slot : after) {
                at::Tensor& M =
                    kept[static_cast<std::size_t>(slot.rank)][static_cast<std::size_t>(slot.slot)]
                        .M;
                M = M.defined() ? M : summary_at(slot).M.clone();
            }
        }
        summaries_ = std::move(kept);
    }

    void pack(const GdnSummary& summary, at::Tensor& own) const {
        std::int64_t offset = 0;
        const auto put = [&](const at::Tensor& flat) {
            own.narrow(0, offset, flat.numel()).copy_(flat);
            offset += flat.numel();
        };
        for (std::size_t slot = 0; slot < prefix_.local_segments.size(); ++slot) {
            const std::int64_t segment = prefix_.local_segments[slot];
            put(summary.S[segment].reshape({-1}));
            put(pack_open(summary.M[segment],
                          independent_.of({context_.plan->rank, static_cast<std::int64_t>(slot)})));
        }
    }

    [[nodiscard]] GdnSummary unpack(const at::Tensor& flat,
                                    const IndependentHeads::Heads& independent) const {
        const std::int64_t S_size = shape_.heads * shape_.key_dim * shape_.value_dim;
        return {
            .S = flat.narrow(0, 0, S_size).view({shape_.heads, shape_.key_dim, shape_.value_dim}),
            .M = unpack_open(flat.narrow(0, S_size, flat.numel() - S_size), independent, shape_)};
    }

    CpContext context_;
    const SummaryGather& prefix_;
    const SummaryGather& suffix_;
    StateShape shape_;
    IndependentHeads independent_;
    /// By rank and slot: of every segment but the last of its chain, S [Hv, K, V] and M [Hv, K, K];
    /// after the forward pass M of those that come after a local one.
    std::vector<std::vector<GdnSummary>> summaries_;
};

}  // namespace

std::unique_ptr<StateExchanger> make_all_gather_exchanger(const CpContext& context,
                                                          const StateShape& shape) {
    return std::make_unique<AllGatherExchanger>(context, shape);
}

}  // namespace hybridcp
