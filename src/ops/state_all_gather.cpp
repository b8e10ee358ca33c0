// All summaries gathered once per direction, then folded locally: S <- M S + S over the segments
// before one's own, dS <- M^T dS + dS over those after it.

#include "ops/state_exchange.h"

namespace hybridcp {

namespace {

class AllGatherExchanger : public StateExchanger {
  public:
    AllGatherExchanger(const CpContext& context, const StateShape& shape)
        : group_(*context.group),
          prefix_(context.plan->prefix),
          suffix_(context.plan->suffix),
          shape_(shape) {}

    at::Tensor start_states(const std::function<GdnSummary()>& summarize) override {
        if (prefix_.slots_per_rank == 0) {  // no document lies on more than one rank
            return {};
        }
        at::Tensor slots = empty_slots(prefix_, shape_.value_dim + shape_.key_dim);
        if (!prefix_.local_segments.empty()) {
            const GdnSummary summary = summarize();
            for (std::size_t slot = 0; slot < prefix_.local_segments.size(); ++slot) {
                const std::int64_t segment = prefix_.local_segments[slot];
                slots[static_cast<std::int64_t>(slot)].copy_(
                    at::cat({summary.S[segment], summary.M[segment]}, -1));
            }
        }
        const at::Tensor gathered =
            group_.all_gather("gdn_summary", slots);  // [P, slots, Hv, K, V + K]
        const at::Tensor S = gathered.narrow(-1, 0, shape_.value_dim);
        M_ = gathered.narrow(-1, shape_.value_dim, shape_.key_dim);
        at::Tensor S_start = zeros();
        for (std::size_t i = 0; i < prefix_.predecessors.size(); ++i) {
            at::Tensor state;
            for (const SummaryGather::Slot& before : prefix_.predecessors[i]) {
                state = state.defined()
                            ? at::matmul(at_slot(M_, before), state) + at_slot(S, before)
                            : at_slot(S, before);
            }
            if (state.defined()) {
                S_start[static_cast<std::int64_t>(i)].copy_(state);
            }
        }
        return S_start;
    }

    at::Tensor end_gradients(const std::function<at::Tensor()>& summarize) override {
        if (suffix_.slots_per_rank == 0) {
            return {};
        }
        at::Tensor slots = empty_slots(suffix_, shape_.value_dim);
        if (!suffix_.local_segments.empty()) {
            const at::Tensor dS = summarize();
            for (std::size_t slot = 0; slot < suffix_.local_segments.size(); ++slot) {
                slots[static_cast<std::int64_t>(slot)].copy_(dS[suffix_.local_segments[slot]]);
            }
        }
        const at::Tensor gathered = group_.all_gather("gdn_gradient_summary", slots);
        at::Tensor dS_end = zeros();
        for (std::size_t i = 0; i < suffix_.successors.size(); ++i) {
            const std::vector<SummaryGather::Slot>& after = suffix_.successors[i];
            at::Tensor state;
            for (std::size_t j = after.size(); j-- > 0;) {
                // M of a later segment stands in the forward gather, which leaves out the last of
                // each chain: there the fold starts.
                state = state.defined()
                            ? at::matmul(at_slot(M_, prefix_.successors[i][j]).transpose(-1, -2),
                                         state) +
                                  at_slot(gathered, after[j])
                            : at_slot(gathered, after[j]);
            }
            if (state.defined()) {
                dS_end[static_cast<std::int64_t>(i)].copy_(state);
            }
        }
        return dS_end;
    }

    void finish() override {}

  private:
    static at::Tensor at_slot(const at::Tensor& gathered, const SummaryGather::Slot& slot) {
        return gathered[slot.rank][slot.slot];
    }

    at::Tensor empty_slots(const SummaryGather& gather, std::int64_t width) const {
        return at::zeros({gather.slots_per_rank, shape_.heads, shape_.key_dim, width},
                         shape_.options);
    }

    at::Tensor zeros() const {
        const auto segments = static_cast<std::int64_t>(prefix_.predecessors.size());
        return at::zeros({segments, shape_.heads, shape_.key_dim, shape_.value_dim},
                         shape_.options);
    }

    Group& group_;
    const SummaryGather& prefix_;
    const SummaryGather& suffix_;
    StateShape shape_;
    at::Tensor M_;  // [P, slots, Hv, K, K], of every segment but the last of its chain
};

}  // namespace

std::unique_ptr<StateExchanger> make_all_gather_exchanger(const CpContext& context,
                                                          const StateShape& shape) {
    return std::make_unique<AllGatherExchanger>(context, shape);
}

}  // namespace hybridcp
